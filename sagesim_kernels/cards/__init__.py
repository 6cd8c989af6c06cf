"""A model of the time on each card, and the spec that is recommended for it."""

from sagesim_kernels.cards.card import (
    CARDS,
    SCHEDULERS,
    SHARED_BYTES,
    SPECIAL,
    WHITEPAPERS,
    Card,
)
from sagesim_kernels.cards.choice import RECOMMENDED, card_class, default_spec, recommended
from sagesim_kernels.cards.model import Fit, Shape, blocks, clocks, loops_ms, tile_clocks
from sagesim_kernels.cards.passes import (
    FLASH,
    Times,
    flash_tile,
    limit,
    loops_of,
    other_bytes,
    predict,
)
from sagesim_kernels.cards.validation import (
    Measured,
    fitted,
    left_out_errors,
    measurements,
    rms,
)

__all__ = [
    "CARDS",
    "FLASH",
    "RECOMMENDED",
    "SCHEDULERS",
    "SHARED_BYTES",
    "SPECIAL",
    "WHITEPAPERS",
    "Card",
    "Fit",
    "Measured",
    "Shape",
    "Times",
    "blocks",
    "card_class",
    "clocks",
    "default_spec",
    "fitted",
    "flash_tile",
    "left_out_errors",
    "limit",
    "loops_ms",
    "loops_of",
    "measurements",
    "other_bytes",
    "predict",
    "recommended",
    "rms",
    "tile_clocks",
]
