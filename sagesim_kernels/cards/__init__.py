"""A model of the time on each card, and the spec that is recommended for it."""

from sagesim_kernels.cards.card import (
    BASES,
    CARDS,
    SCHEDULERS,
    SHARED_BYTES,
    SHUFFLES,
    SOURCES,
    SPECIAL,
    Card,
)
from sagesim_kernels.cards.choice import RECOMMENDED, card_class, default_spec, recommended
from sagesim_kernels.cards.model import (
    Fit,
    Shape,
    blocks,
    clocks,
    loops_ms,
    missed_share,
    tile_clocks,
)
from sagesim_kernels.cards.passes import (
    FLASH,
    FLASH_COPIES,
    Times,
    flash_tile,
    limit,
    loops_of,
    other_bytes,
    predict,
)
from sagesim_kernels.cards.validation import (
    Measured,
    fits_without_each,
    fitted,
    measurements,
    rms,
)

__all__ = [
    "BASES",
    "CARDS",
    "FLASH",
    "FLASH_COPIES",
    "RECOMMENDED",
    "SCHEDULERS",
    "SHARED_BYTES",
    "SHUFFLES",
    "SOURCES",
    "SPECIAL",
    "Card",
    "Fit",
    "Measured",
    "Shape",
    "Times",
    "blocks",
    "card_class",
    "clocks",
    "default_spec",
    "fits_without_each",
    "fitted",
    "flash_tile",
    "limit",
    "loops_ms",
    "loops_of",
    "measurements",
    "missed_share",
    "other_bytes",
    "predict",
    "recommended",
    "rms",
    "tile_clocks",
]
