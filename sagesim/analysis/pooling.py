"""The average of several attributions, such as those of the layers of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sagesim.analysis.attribution import Attribution, SiteEffect, SwitchEffect
from sagesim.analysis.metrics import geometric_mean, mean, pool_errors
from sagesim.analysis.number_range import largest_losses
from sagesim.analysis.runs import OUTPUTS


def pool(attributions: Sequence[Attribution]) -> Attribution:
    """Average several attributions of the same base spec, for example of all layers of a model.

    Errors are averaged geometrically, shares arithmetically. Every attribution has the same weight,
    however large its gradients. An attribution is left out for a tensor that is zero in it, see
    `pool_errors`.

    Raises:
        ValueError: if there is none, or the base specs differ.
    """
    if not attributions:
        raise ValueError("there is no attribution to pool")
    first, *others = attributions
    if any(a.base != first.base for a in others):
        raise ValueError("attributions to be pooled need one base spec; theirs differ")

    own = [a.own_forward for a in attributions if a.own_forward is not None]

    def of_each(numbers: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """The numbers of each of `OUTPUTS`, of the attributions in which it is not zero."""
        found = {
            t: [x[t] for x, a in zip(numbers, attributions, strict=True) if t not in _zeros(a)]
            for t in OUTPUTS
        }
        return {t: each or [x[t] for x in numbers] for t, each in found.items()}

    def averaged(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {t: geometric_mean(each) for t, each in of_each(errors).items()}

    def pooled(effects: Sequence[SiteEffect]) -> SiteEffect:
        return SiteEffect(
            effects[0].site,
            averaged([e.only for e in effects]),
            averaged([e.without for e in effects]),
            {t: mean(each) for t, each in of_each([e.share for e in effects]).items()},
            math.sqrt(sum(e.sampling_error**2 for e in effects)) / len(effects),
        )

    return Attribution(
        base=first.base,
        error=averaged([a.error for a in attributions]),
        errors=pool_errors([a.errors for a in attributions]),
        sites=tuple(
            pooled(effects) for effects in zip(*(a.sites for a in attributions), strict=True)
        ),
        logits=pooled([a.logits for a in attributions]),
        switches=tuple(
            SwitchEffect(
                effects[0].switch,
                effects[0].spec,
                averaged([e.error for e in effects]),
            )
            for effects in zip(*(a.switches for a in attributions), strict=True)
        ),
        range_losses=largest_losses(loss for a in attributions for loss in a.range_losses),
        measured=mean([a.measured for a in attributions]),
        own_forward=None if len(own) < len(attributions) else pool(own),
    )


def _zeros(attribution: Attribution) -> set[str]:
    """The tensors that are zero, so that there is nothing to attribute."""
    return {t for t in OUTPUTS if attribution.errors[t].is_of_zeros}
