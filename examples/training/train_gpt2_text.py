"""Train a small GPT-2 with a tied head, byte by byte, on the language reference inside Python.

    OMP_NUM_THREADS=1 python examples/training/train_gpt2_text.py

Takes about six minutes on one core. A Hugging Face directory is written to
`examples/checkpoints/tiny_gpt2/`: the model, the held-out text, and a record of the run. A tenth of
the text is held out; it is looked at once, after the last step. Another version of Python ships
another text, and so gives other weights.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from normswap.param_groups import no_decay_groups

SEED = 0
CONTEXT = 128
VOCABULARY = 256
STEPS = 2400
BATCH = 32
LEARNING_RATE = 0.006
RUN = 16  # paragraphs in a row that are held out or trained on together
OUT = Path(__file__).resolve().parents[1] / "checkpoints" / "tiny_gpt2"
README = """# A small GPT-2 with a tied head

Written by `examples/training/train_gpt2_text.py`: {layers} layers of width {width}, a token a byte.
`training.json` says how it was trained, and its loss on `held_out.txt` (nats a byte, in windows of
{context} bytes), which it never saw. The text is from the Python {python} documentation, copyright
Python Software Foundation, under the PSF License Version 2.
"""


def split_text() -> tuple[bytes, bytes]:
    """The text to train on and the held-out text. Topics repeat each other: no paragraph does."""
    paragraphs = list(dict.fromkeys(p for name in sorted(topics) for p in paragraphs_of(name)))
    runs = [paragraphs[start : start + RUN] for start in range(0, len(paragraphs), RUN)]
    held_out = runs[5::10]
    trained_on = [run for number, run in enumerate(runs) if number % 10 != 5]
    return joined(trained_on), joined(held_out)


def paragraphs_of(topic: str) -> list[str]:
    return topics[topic].strip().split("\n\n")


def joined(runs: list[list[str]]) -> bytes:
    return "\n\n".join(paragraph for run in runs for paragraph in run).encode()


def windows(text: bytes) -> Tensor:
    """Token ids [N, CONTEXT] of consecutive pieces of a text; the rest at its end is dropped."""
    ids = torch.tensor(list(text))
    return ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def batches(text: bytes) -> Iterator[Tensor]:
    """Token ids [BATCH, CONTEXT] from random places."""
    ids = torch.tensor(list(text))
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - CONTEXT + 1, (BATCH, 1))
        yield ids[starts + torch.arange(CONTEXT)]


def build() -> GPT2LMHeadModel:
    """The untrained network, without dropout: the text is seen about thirty times."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def train(text: bytes) -> GPT2LMHeadModel:
    """A network trained for a fixed number of steps; returned in eval mode."""
    network = build()
    optimizer = torch.optim.AdamW(no_decay_groups(network, 0.1), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.1)
    for step, batch in enumerate(batches(text), 1):
        loss = network(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:4d}/{STEPS}  loss {loss.item():.3f}", flush=True)
    return network.eval()


def held_out_loss(network: GPT2LMHeadModel, text: bytes) -> float:
    """Nats a byte: the mean over every byte but the first of each window."""
    ids = windows(text)
    with torch.inference_mode():
        return network(input_ids=ids, labels=ids).loss.item()


def unigram_loss(text: bytes, held_out: bytes) -> float:
    """Nats a byte of a model that knows only how frequent each byte is."""
    counts = torch.bincount(torch.tensor(list(text)), minlength=VOCABULARY) + 1.0
    return -(counts / counts.sum()).log()[windows(held_out)[:, 1:]].mean().item()


def main() -> None:
    """Train, measure once on the held-out part, write the directory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=OUT, help="directory to write to")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)

    text, held_out = split_text()
    network = train(text)
    record = {
        "data": f"pydoc_data.topics of Python {platform.python_version()}, as UTF-8",
        "seed": SEED,
        "trained_on": len(text),
        "held_out": len(held_out),
        "held_out_loss": held_out_loss(network, held_out),
        "unigram_loss": unigram_loss(text, held_out),
        "steps": STEPS,
        "parameters": sum(p.numel() for p in network.parameters()),
    }
    network.save_pretrained(out)
    (out / "held_out.txt").write_bytes(held_out)
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    readme = README.format(
        layers=network.config.n_layer,
        width=network.config.n_embd,
        context=CONTEXT,
        python=platform.python_version(),
    )
    (out / "README.md").write_text(readme, encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
