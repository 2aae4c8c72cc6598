"""What the shell completes after an option: names of recipes, families and figures."""

from __future__ import annotations

FIGURES = (
    *("filters", "positions"),  # of the weights
    *("attribution", "rollout", "attention", "features", "lens", "scoring"),
    *("distance", "similarity", "ablation"),
)


def recipe_names(incomplete: str) -> list[str]:
    from vitrail.training.recipes import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


def family_names(incomplete: str) -> list[str]:
    from vitrail.weights.families import FAMILIES

    return [family.name for family in FAMILIES if family.name.startswith(incomplete)]


def figure_names(incomplete: str) -> list[str]:
    """Names separated by commas: the last one is completed."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in FIGURES if name.startswith(last)]
