"""Writes operators.json: results and gradients of PyTorch's operators in float64, for tests/it/torch_vectors.rs.

    python record.py > operators.json
"""

import json

import torch
import torch.nn.functional as F

torch.manual_seed(40)
torch.set_default_dtype(torch.float64)


def numbers(tensor):
    kind = "u8" if tensor.dtype == torch.bool else "i64" if tensor.dtype == torch.int64 else "f64"
    values = [float(f"{v:.17g}") for v in tensor.detach().to(torch.float64).flatten().tolist()]
    return {"type": kind, "shape": list(tensor.shape), "values": values}


CASES = []


def case(operator, call, inputs, constants=(), **options):
    """`call` of the inputs, which have gradients, and the constants."""
    inputs = [t.clone().requires_grad_() for t in inputs]
    y = call(*inputs, *constants)
    dy = torch.randn_like(y)
    y.backward(dy)
    CASES.append({
        "operator": operator,
        "options": options,
        "inputs": [numbers(t) for t in inputs],
        "constants": [numbers(t) for t in constants],
        "dy": numbers(dy),
        "y": numbers(y),
        "gradients": [numbers(t.grad) for t in inputs],
    })


randn = torch.randn
case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w, 0.125), [randn(2, 3, 6), randn(6)], eps=0.125)
case("silu", F.silu, [randn(3, 5) * 4])
case("swiglu", lambda gate, up: F.silu(gate) * up, [randn(3, 5) * 4, randn(3, 5)])


def rope(x, cos, sin):
    """As transformers' Llama: `rotate_half`."""
    cos, sin = (torch.cat([t, t], -1)[: x.shape[2]] for t in (cos, sin))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def rope_i(x, cos, sin):
    """As Meta's Llama: a product of complex numbers."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.complex(cos, sin)[: x.shape[2]]
    return torch.view_as_real(turned).flatten(3)


angles = randn(5, 3)
for name, call in [("rope", rope), ("rope_i", rope_i)]:
    case(name, call, [randn(2, 2, 4, 6), angles.cos(), angles.sin()])


def sdpa(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)


def qkv(heads, kv_heads, queries, keys):
    return [randn(2, heads, queries, 4), randn(2, kv_heads, keys, 4), randn(2, kv_heads, keys, 3)]


attention = "scaled_dot_product_attention"
case(attention, sdpa, qkv(2, 2, 3, 5))
case(attention, sdpa, qkv(4, 2, 3, 5))
case(attention, lambda q, k, v: sdpa(q, k, v, scale=0.75), qkv(4, 1, 3, 3), scale=0.75)
for queries, keys in [(4, 4), (3, 5), (5, 3)]:
    causal = lambda q, k, v: sdpa(q, k, v, is_causal=True)
    case(attention, causal, qkv(2, 1, queries, keys), causal=True)
seen = torch.rand(2, 1, 3, 5) < 0.6
seen[0, 0, 1] = False  # This query sees nothing.
seen[1, 0, :, 0] = True
case(attention, sdpa, qkv(2, 2, 3, 5), [seen])
case(attention, sdpa, qkv(2, 2, 3, 5), [torch.randn(3, 5)])
case(attention, sdpa, [*qkv(4, 2, 3, 5), randn(4, 3, 5)])

logits, labels = randn(5, 4) * 3, torch.tensor([3, 0, -100, 2, 0])
weight = torch.tensor([0.5, 2.0, 0.25, 1.25])
for w in [None, weight]:
    for smoothing in [0.0, 0.125]:
        for ignored in [-100, 0]:
            used = labels if ignored == -100 else torch.where(labels < 0, 1, labels)

            def loss(x, y, w=None, smoothing=smoothing, ignored=ignored):
                return F.cross_entropy(x, y, w, ignore_index=ignored, label_smoothing=smoothing)

            constants = [used] if w is None else [used, w]
            case("cross_entropy", loss, [logits], constants, ignore_index=ignored, label_smoothing=smoothing)

ids = torch.tensor([[2, 0, 2], [1, 1, 3]])
case("embedding", lambda w, ids: F.embedding(ids, w), [randn(5, 3)], [ids])
case("embedding", lambda w, ids: F.embedding(ids, w, padding_idx=2), [randn(5, 3)], [ids], padding=2)

case("log_softmax", lambda x: F.log_softmax(x, -1), [randn(3, 5) * 4])
x = randn(1, 2, 4, 5)
for sizes in [[2, 2, 0], [3, 2, 1]]:
    case("avg_pool2d", lambda x: F.avg_pool2d(x, *sizes), [x], sizes=sizes)
for sizes in [[3, 2], [1, 1], [6, 5]]:
    case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, sizes), [x], sizes=sizes)
for mode in ["constant", "reflect", "replicate"]:
    case("pad", lambda x: F.pad(x, [1, 2, 2, 0], mode), [x], mode=mode)
norm = lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=0.125)
case("instance_norm", norm, [x, randn(2), randn(2)], eps=0.125)
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), [randn(1, 8, 1, 2)])
case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), [randn(1, 2, 2, 4)])
case("gather", lambda x, i: x.gather(1, i), [randn(3, 4)], [torch.tensor([[3, 0, 3], [1, 1, 1]])])
for sizes in [[1, 0, 1, 1], [2, 1, 1, 2], [1, 2, 2, 1]]:
    stride, padding, dilation, groups = sizes
    inputs = [randn(2, 2, 3, 4, 3), randn(2, 2 // groups, 2, 3, 2), randn(2)]
    case("conv3d", lambda x, w, b: F.conv3d(x, w, b, stride, padding, dilation, groups), inputs, sizes=sizes)
for sizes in [[3, 2], [1, 1], [6, 5]]:
    case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, sizes), [randn(1, 2, 4, 5)], sizes=sizes)

print(json.dumps({"torch": torch.__version__, "cases": CASES}))
