"""Pictures on a page: where a model was surest and wrong, and where it looks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitrail.data.sources import Split
from vitrail.evaluation.run import Evaluation, match_classes
from vitrail.report.numbers import percent
from vitrail.report.page import Picture, Section
from vitrail.report.pictures import Seen, look
from vitrail.weights.bundle import Bundle

MISTAKES = 12
EXAMPLES = 8

LOOKED = (
    "On the right, where the model looked (attention rollout): the attention of all layers multiplied "
    "together, which says what share of the answer came from which patch. Dark is nothing, bright yellow the "
    "most in this picture. It shows where information came from, not why the answer was given."
)
BACKGROUND = (
    "On the left, the picture as the model got it, resized and cut. Look for wrong labels, for pictures that "
    "show two classes, and for things in the background that give the wrong hint."
)
BESIDE = " On the right, where the model looked; “Where it looks” says how to read that."


def mistakes(found: Evaluation, bundle: Bundle, split: Split) -> list[Section]:
    """The surest wrong answers, with their pictures."""
    scores, title = found.scores, "Where it was sure and wrong"
    if scores is None:
        return []
    if not scores.mistakes:
        return [Section(title, ["There is nothing to show: no answer was wrong."])]
    worst = scores.mistakes[:MISTAKES]
    place = {name: at for at, name in reversed(list(enumerate(split.names)))}
    seen = {one.place: one for one in look(bundle, split, [place[m.name] for m in worst if m.name in place])}
    cards = []
    for one in worst:
        picture = seen.get(place.get(one.name, -1))
        views = picture.views(f"A picture of {one.was}") if picture else []
        lines = [f"It shows {one.was}", f"{percent(one.score)} sure", one.name]
        cards.append(Picture(views, f"Said {one.said}", lines))
    text = [f"The {len(worst)} wrong answers it was surest of, the surest first."]
    if scores.top1 is not None and (wrong := scores.count - round(scores.top1 * scores.count)) > len(worst):
        text = [f"Of its {wrong:,} wrong answers, the {len(worst)} it was surest of, the surest first."]
    return [
        Section(title, text, pictures=cards, how_to_read=BACKGROUND + BESIDE * has_maps(list(seen.values())))
    ]


def examples(found: Evaluation, bundle: Bundle, split: Split) -> list[Section]:
    """Some pictures taken evenly through the split, whatever came of them, and where the model looked."""
    if found.scores is None:
        return []
    columns = match_classes(bundle, found.classes, [])
    seen = look(bundle, split, evenly(len(split), EXAMPLES))
    cards = []
    for one in seen:
        logits = one.logits[columns].tolist()
        said, was = found.classes[logits.index(max(logits))], shown(split, one.place, found.classes)
        verdict = "Right" if said in was else f"Wrong: it shows {', '.join(was) or 'none of the classes'}"
        score = percent(surest(logits, several=split.labels.ndim == 2))
        lines = [verdict, f"{score} sure", split.names[one.place]]
        cards.append(Picture(one.views(f"A picture of {', '.join(was)}"), f"Said {said}", lines))
    text = ["Taken evenly from all pictures, not by how well they went."]
    how = LOOKED if has_maps(seen) else ""
    return [Section("Where it looks", text, pictures=cards, how_to_read=how)] if cards else []


def has_maps(seen: Sequence[Seen]) -> bool:
    return any(one.looked is not None for one in seen)


def evenly(count: int, wanted: int) -> list[int]:
    """So many places, spread over all; all of them where there are fewer."""
    return sorted({(2 * i + 1) * count // (2 * wanted) for i in range(wanted)}) if count else []


def surest(logits: list[float], several: bool) -> float:
    """The probability of the largest logit: among all, or by itself where a picture can show several."""
    most = max(logits)
    return 1 / (1 + math.exp(-max(most, -700.0))) if several else 1 / sum(math.exp(z - most) for z in logits)


def shown(split: Split, place: int, classes: Sequence[str]) -> list[str]:
    """What a picture shows."""
    label = split.labels[place]
    return [classes[int(label)]] if split.labels.ndim == 1 else [classes[k] for k in label.nonzero()[0]]
