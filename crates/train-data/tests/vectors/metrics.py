"""Metrics of random outputs by torchmetrics, as JSON, for tests/it/metrics.rs.

    python metrics.py 0 > metrics.json

The argument is the seed. Made by Python 3.11, PyTorch 2.15.0, torchmetrics 1.9.0 on 2026-11-27.
Logits are whole numbers of 1/32 below 8 in size, which f16 and bf16 hold exactly; no two of a row are equal.
"""

import json
import sys

import torch
from torchmetrics.functional import classification as c
from torchmetrics.functional.text import perplexity

THRESHOLDS = 11
AVERAGES = ["micro", "macro", "weighted", "none"]


def logits(shape, classes, generator):
    """Whole numbers, of which 32 are a unit, classes last."""
    rows = []
    for _ in range(torch.Size(shape).numel()):
        rows.append(torch.randperm(511, generator=generator)[:classes] - 255)
    return torch.stack(rows).reshape(*shape, classes)


def values(result):
    return result.double().reshape(-1).tolist()


def scores(x, labels, classes, ignore_index):
    """All metrics whose classes are the second dimension."""
    kwargs = {"num_classes": classes, "ignore_index": ignore_index}
    functions = {
        "precision": c.multiclass_precision,
        "recall": c.multiclass_recall,
        "f1": c.multiclass_f1_score,
        "mIoU": c.multiclass_jaccard_index,
    }
    expected = {
        f"{name} {average}": values(function(x, labels, average=average, **kwargs))
        for name, function in functions.items()
        for average in AVERAGES
    }
    for average in AVERAGES[1:]:
        ap = c.multiclass_average_precision(x, labels, average=average, thresholds=THRESHOLDS, **kwargs)
        expected[f"mAP {average}"] = values(ap)
    expected["confusion_matrix"] = values(c.multiclass_confusion_matrix(x, labels, **kwargs))
    for k in [1, 2, 3]:
        expected[f"accuracy {k}"] = values(c.multiclass_accuracy(x, labels, average="micro", top_k=k, **kwargs))
    return expected


def likelihoods(x, labels, ignore_index):
    """Those whose classes are the last dimension."""
    ignored = -100 if ignore_index is None else ignore_index
    loss = torch.nn.functional.cross_entropy(x.flatten(0, -2), labels.flatten(), ignore_index=ignored)
    return {"perplexity": values(perplexity(x, labels, ignore_index=ignore_index)), "loss": values(loss)}


def case(name, shape, classes, generator, ignore_index=None, absent=None, last=False):
    x = logits(shape, classes, generator)
    # Likely enough right for every score to have a value of its own.
    labels = torch.where(
        torch.rand(shape, generator=generator) < 0.4,
        x.argmax(-1),
        torch.randint(classes, shape, generator=generator),
    )
    if absent is not None:
        x[..., absent] = -255 - torch.arange(x[..., absent].numel()).reshape(shape) % 2
        labels[labels == absent] = (absent + 1) % classes
    if ignore_index is not None:
        labels[torch.rand(shape, generator=generator) < 0.25] = ignore_index
    floats = x.float() / 32
    if last:
        expected = likelihoods(floats.double(), labels, ignore_index)
    else:
        x, floats = x.movedim(-1, 1), floats.movedim(-1, 1)
        # In double precision, so that a softmax falls on the same side of a threshold.
        expected = scores(floats.double(), labels, classes, ignore_index)
    return {
        "name": name,
        "classes": classes,
        "ignore_index": ignore_index,
        "shape": list(x.shape),
        "logits": x.flatten().tolist(),
        "label_shape": list(shape),
        "labels": labels.flatten().tolist(),
        "expected": expected,
    }


def main():
    generator = torch.Generator().manual_seed(int(sys.argv[1]))
    cases = [
        case("classes", (40,), 5, generator),
        case("an absent class", (24,), 6, generator, absent=5),
        case("pixels, 255 is left out", (2, 3, 4), 4, generator, ignore_index=255),
        case("a class is left out", (24,), 4, generator, ignore_index=2),
        case("few samples", (6,), 7, generator),
        case("tokens", (4, 3), 5, generator, last=True),
        case("tokens, -100 is left out", (2, 6), 19, generator, ignore_index=-100, last=True),
    ]
    # torchmetrics may repeat a warning on standard output.
    print(json.dumps({"thresholds": THRESHOLDS, "cases": cases}))


main()
