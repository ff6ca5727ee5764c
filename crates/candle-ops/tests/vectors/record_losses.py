"""Writes losses.json: values and gradients of PyTorch's losses in float64, for tests/it/torch_losses.rs.

    python record_losses.py > losses.json
"""

import json

import torch
import torch.nn.functional as F

torch.manual_seed(42)
torch.set_default_dtype(torch.float64)
CASES = []


def numbers(tensor):
    values = [float(f"{v:.12g}") for v in tensor.detach().flatten().tolist()]
    return {"shape": list(tensor.shape), "values": values}


def case(loss, call, inputs, constants=(), number=None):
    inputs = [((t * 1000).round() / 1000).requires_grad_() for t in inputs]
    y = call(*inputs, *constants)
    y.backward(torch.ones_like(y))
    CASES.append({
        "loss": loss,
        "number": number,
        "inputs": [numbers(t) for t in inputs],
        "constants": [numbers(t) for t in constants],
        "y": numbers(y),
        "gradients": [numbers(t.grad) for t in inputs],
    })


randn = torch.randn
logits = torch.cat([randn(2, 3) * 3, torch.tensor([[100.0, -100.0, 0.0]])])
targets = torch.tensor([[0.0, 1.0, 0.25], [1.0, 0.0, 0.5], [1.0, 1.0, 1.0]])
case("bce", F.binary_cross_entropy_with_logits, [logits], [targets])
case("mse", F.mse_loss, [randn(2, 3), randn(2, 3)])
case("huber", lambda a, b: F.huber_loss(a, b, delta=0.7), [randn(4, 3), randn(4, 3)], number=0.7)
for beta in [1.0, 0.3, 0.0]:
    case("smooth_l1", lambda a, b: F.smooth_l1_loss(a, b, beta=beta), [randn(4, 3), randn(4, 3)], number=beta)
target = torch.tensor([[0.5, 0.5, 0.0], [0.125, 0.25, 0.625]])
case("kl_div", lambda x, t: F.kl_div(x, t, reduction="batchmean"), [randn(2, 3).log_softmax(1)], [target])
case("kl_div", lambda x, t: F.kl_div(x, t, reduction="batchmean"), [randn(2, 3), torch.rand(2, 3) + 0.1])
case("cosine_similarity", lambda a, b: F.cosine_similarity(a, b, dim=1), [randn(3, 4), randn(3, 4)], number=1e-8)
short = torch.cat([randn(2, 4), torch.zeros(1, 4)])
case("cosine_similarity", lambda a, b: F.cosine_similarity(a, b, dim=1, eps=0.5), [short, randn(3, 4)], number=0.5)
kinds = torch.tensor([1.0, -1.0, -1.0, 1.0])
case("cosine_embedding", lambda a, b, t: F.cosine_embedding_loss(a, b, t, 0.1),
     [randn(4, 3), randn(4, 3)], [kinds], number=0.1)
anchor = randn(4, 3)
near = torch.cat([anchor[:1], randn(3, 3)])
case("triplet_margin", lambda a, p, n: F.triplet_margin_loss(a, p, n, 0.5), [anchor, near, randn(4, 3)], number=0.5)


def ctc(x, targets, frames, lengths, blank=0, **options):
    """Of logits."""
    targets, frames, lengths = (t.to(torch.int64) for t in (targets, frames, lengths))
    return F.ctc_loss(x.log_softmax(2), targets, frames, lengths, blank, **options)


# Equal labels, as many frames as needed, no labels, too few frames. Labels beyond the lengths are
# not read.
labels = torch.tensor([[1.0, 1, 2], [2, 3, 1], [0, 0, 0], [2, 2, 0]])
sizes = [torch.tensor([6.0, 3, 4, 2]), torch.tensor([3.0, 3, 0, 2])]
for reduction in ["mean", "sum", "none"]:
    options = {"reduction": reduction, "zero_infinity": True}
    case(f"ctc_{reduction}", lambda *t: ctc(*t, **options), [randn(6, 4, 4) * 2], [labels, *sizes], number=0)
sizes = [torch.tensor([5.0, 4]), torch.tensor([2.0, 1])]
labels = torch.tensor([[0.0, 2], [1, 1]])
case("ctc_mean", lambda *t: ctc(*t, blank=3), [randn(5, 2, 4) * 2], [labels, *sizes], number=3)
print(json.dumps({"torch": torch.__version__, "cases": CASES}))
