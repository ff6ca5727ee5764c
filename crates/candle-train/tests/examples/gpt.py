"""The example gpt: resumed to the bit, its losses and tokens a second beside those of PyTorch.

    gpt.py LAUNCH GPT DIRECTORY

LAUNCH and GPT are the programs. Needs PyTorch. Exits with 1 if a check fails.
"""

import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

LAUNCH, GPT, DIRECTORY = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
EPOCHS, PER_EPOCH, BATCH, CONTEXT, HEADS, LAYERS = 4, 30, 16, 64, 5, 6
STEPS = EPOCHS * PER_EPOCH
# Of losses of the same step. bf16 rounds at other places in PyTorch.
TOLERANCE = 0.02


def read_safetensors(path):
    """Tensors by name: a safetensors file is a length, JSON, and bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    types = {"F32": torch.float32, "U32": torch.int32}
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if entry.get("dtype") in types:
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            flat = torch.frombuffer(bytearray(data[begin:end]), dtype=types[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def run(directory, until=None):
    """Trains on two ranks; kills them amid the epoch after the line that begins with `until`."""
    command = [LAUNCH, "--nproc-per-node", "2", "--", GPT, str(directory), str(EPOCHS)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in program.stdout:
        print(line, end="", flush=True)
        if until and until in line:
            time.sleep(5)
            program.kill()
    return program.wait()


def log_of(directory):
    lines = (directory / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def forward(p, tokens):
    x = F.embedding(tokens, p["tokens"]) + p["positions"]
    for layer in range(LAYERS):
        q = lambda name: p[f"blocks.{layer}.{name}"]
        linear = lambda x, name: F.linear(x, q(f"{name}.weight"), q(f"{name}.bias"))
        norm = lambda x, name: F.layer_norm(x, x.shape[-1:], q(f"{name}.weight"), q(f"{name}.bias"))
        b, t, width = x.shape
        qkv = linear(norm(x, "norm1"), "qkv").view(b, t, 3, HEADS, width // HEADS)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(b, t, width), "out")
        x = x + linear(F.gelu(linear(norm(x, "norm2"), "up")), "down")
    x = F.layer_norm(x, x.shape[-1:], p["norm.weight"], p["norm.bias"])
    return F.linear(x, p["head.weight"])


class Twin:
    """The same training in PyTorch: weights of `start`, and batches as they are given."""

    def __init__(self, start, is_bf16):
        tensors = read_safetensors(start / "start.safetensors")
        self.params = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        self.text = read_safetensors(start / "tokens.safetensors")["tokens"].long()
        self.is_bf16 = is_bf16
        self.optimizer = torch.optim.AdamW(
            self.params.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )

    def step(self, step, windows):
        for group in self.optimizer.param_groups:
            cosine = 0.55 + 0.45 * math.cos(math.pi * step / STEPS)
            group["lr"] = 1e-3 * min((step + 1) / 20, cosine)
        cut = lambda ahead: torch.stack([self.text[w * CONTEXT + ahead :][:CONTEXT] for w in windows])
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_bf16):
            logits = forward(self.params, cut(0))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), cut(1).flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params.values(), 1.0)
        self.optimizer.step()
        return loss.item()


def check_resume(whole, parts):
    assert run(whole) == 0, "the training failed"
    parts.mkdir()
    shutil.copy(whole / "tokens.safetensors", parts)
    shutil.copy(whole / "tokenizer.json", parts)
    shutil.copy(whole / "start.safetensors", parts / "run.safetensors")
    assert run(parts, f"epoch {EPOCHS // 2 - 1}:") != 0, "it was not interrupted"
    assert run(parts) == 0, "it does not go on"
    losses = {entry["step"]: entry["loss"] for entry in log_of(whole)}
    resumed = log_of(parts)
    repeated = len(resumed) - STEPS
    assert repeated > 0 and {entry["step"] for entry in resumed} == set(range(STEPS)), repeated
    for entry in resumed:
        assert entry["loss"] == losses[entry["step"]], entry
    same = (whole / "run.safetensors").read_bytes() == (parts / "run.safetensors").read_bytes()
    assert same, "the saved files differ"
    print(f"resumed: all bits of {STEPS} losses and of the saved file, {repeated} steps done again")


def check_losses(whole):
    twin, worst = Twin(whole, True), 0.0
    for entry in log_of(whole):
        step, ours = entry["step"], entry["loss"]
        theirs = twin.step(step, [window for rank in entry["windows"] for window in rank])
        worst = max(worst, abs(ours - theirs))
        if step % PER_EPOCH == PER_EPOCH - 1:
            print(f"step {step}: loss {ours:.4f}, PyTorch's {theirs:.4f}", flush=True)
    print(f"losses differ by at most {worst:.4f} (allowed: {TOLERANCE})")
    assert worst <= TOLERANCE


def compare_speed(whole, directory, rounds=2):
    """One process of one thread each, by turns; best of the rounds."""
    torch.set_num_threads(1)
    windows = [[w for rank in entry["windows"] for w in rank] for entry in log_of(whole)]
    for precision in ("f32", "bf16"):
        ours, theirs = 0.0, 0.0
        for _ in range(rounds):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            for name in ("tokens.safetensors", "tokenizer.json"):
                shutil.copy(whole / name, directory)
            printed = subprocess.run(
                [GPT, str(directory), "1", precision],
                env={**os.environ, "RAYON_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            ours = max(ours, float(printed.split(" tokens a second")[0].split()[-1]))
            twin = Twin(whole, precision == "bf16")
            begun = time.time()
            for step in range(PER_EPOCH // 2):
                twin.step(step, windows[step])
            speed = PER_EPOCH // 2 * BATCH * CONTEXT / (time.time() - begun)
            theirs = max(theirs, speed)
        print(f"{precision}: {ours:.0f} tokens a second, PyTorch {theirs:.0f}: ratio {ours / theirs:.2f}")


shutil.rmtree(DIRECTORY, ignore_errors=True)
DIRECTORY.mkdir(parents=True)
check_resume(DIRECTORY / "whole", DIRECTORY / "parts")
check_losses(DIRECTORY / "whole")
compare_speed(DIRECTORY / "whole", DIRECTORY / "speed")
