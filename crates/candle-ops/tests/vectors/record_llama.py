"""Writes llama/: small Llamas saved by transformers, their logits and gradients, for tests/it/llama.rs.

    python record_llama.py
"""

import pathlib
import sys

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = pathlib.Path(__file__).parent / "llama"
SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# All that is optional in the second one.
MODELS = {
    "plain": {"rms_norm_eps": 1e-5},
    "options": {
        "num_hidden_layers": 1,
        "head_dim": 6,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": SCALING,
    },
}


def record(name, options):
    model = LlamaForCausalLM(LlamaConfig(**SIZES | options)).train()
    for weight in model.parameters():
        if weight.dim() == 1:  # norms of 1, biases of 0
            torch.nn.init.normal_(weight, float(weight.detach().mean()), 0.2)
    model.save_pretrained(FOLDER / name)
    (FOLDER / name / "generation_config.json").unlink()

    tokens = torch.randint(0, SIZES["vocab_size"], (2, 40))
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    values = {f"gradient.{name}": weight.grad for name, weight in model.named_parameters()}
    text = model.eval().generate(tokens[:1, :10], max_new_tokens=20, do_sample=False)
    values |= {"tokens": tokens, "logits": out.logits.detach(), "loss": out.loss.detach(), "greedy": text[0, 10:]}
    save_file({name: value.contiguous() for name, value in values.items()}, FOLDER / name / "values.safetensors")


def compare(folder):
    """Prints the difference of a model saved by the test to the recorded logits."""
    from safetensors.torch import load_file

    values = load_file(FOLDER / "plain" / "values.safetensors")
    logits = LlamaForCausalLM.from_pretrained(folder)(input_ids=values["tokens"]).logits
    print((logits - values["logits"]).abs().max().item())


if len(sys.argv) > 1:
    compare(sys.argv[1])
else:
    torch.manual_seed(41)
    for name, options in MODELS.items():
        record(name, options)
