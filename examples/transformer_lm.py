"""Train a small transformer on the text of Python's own manual topics, letter by letter: 465 kB, in every Python.

The same script runs alone, on a local cluster, and on many hosts:

    python examples/transformer_lm.py
    psctl local --servers 2 --workers 2 examples/transformer_lm.py
    psctl worker --coordinator HOST:PORT examples/transformer_lm.py

The learning rate warms up and falls over the steps of the whole job: `worker.schedule` keeps all workers, late ones
too, at the same place in it.
"""

from __future__ import annotations

import argparse
from pydoc_data import topics

import torch
from torch import Tensor, nn

import workers

CONTEXT = 64
"""Letters that the model sees at most."""


def main() -> None:
    """Train, then evaluate on weights pulled from the servers, and let the model write."""
    options = parse()
    torch.manual_seed(options.seed)  # the first worker's initial weights count; others take them
    letters, train, test = text()

    with workers.join() as worker:
        model = Transformer(len(letters))
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        worker.attach(model, optimizer)
        steps = options.epochs * (len(train) // options.batch_size)
        scheduler = worker.schedule(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps)))

        step = 0
        for epoch in worker.epochs(train, options.batch_size, count=options.epochs, seed=options.seed):
            for windows in epoch:
                loss = loss_of(model, windows)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # push the gradients, take the new weights
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                if step % 10 == 1:
                    worker.report(loss=loss.item())

        worker.pull()  # others may have pushed since this worker's last step
        with torch.no_grad():
            test_loss = loss_of(model, test).item()
        worker.report(test_loss=test_loss)
        print(f"test loss {test_loss:.4f} per letter after {step} steps of this worker")
        print(write(model, letters, "The ", options.letters))


def parse() -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description="Train a language model on Python's manual topics.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate at its peak")
    parser.add_argument("--letters", type=int, default=200, help="how much to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def text() -> tuple[str, Tensor, Tensor]:
    """(all letters that occur, windows for training, windows for testing); a window is CONTEXT + 1 numbers of letters.

    Windows overlap by one letter. Every tenth one is for testing.
    """
    everything = "\n".join(body for _, body in sorted(topics.topics.items()))
    letters = "".join(sorted(set(everything)))
    number = {letter: index for index, letter in enumerate(letters)}
    windows = torch.tensor([number[letter] for letter in everything]).unfold(0, CONTEXT + 1, CONTEXT).contiguous()
    is_test = torch.arange(len(windows)) % 10 == 9
    return letters, windows[~is_test], windows[is_test]


class Transformer(nn.Module):
    """Two layers of 64 numbers and 4 heads: 110,784 parameters for 103 letters. Input and output share their matrix."""

    def __init__(self, letters: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, letters, bias=False)
        self.output.weight = self.letters.weight
        for table in (self.letters, self.places):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) numbers of letters → (batch, length, letters) scores of the letter that follows each."""
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.letters(x) + self.places(torch.arange(length))
        return self.output(self.layers(hidden, mask=mask, is_causal=True))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy per letter, in nats."""
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def factor(step: int, steps: int) -> float:
    """Of the peak learning rate: up over the first tenth, then down to a twentieth."""
    return min((step + 1) / (steps / 10), max(0.05, 1 - step / steps))


@torch.no_grad()
def write(model: nn.Module, letters: str, start: str, count: int) -> str:
    """Let the model continue `start`."""
    numbers = [letters.index(letter) for letter in start]
    for _ in range(count):
        scores = model(torch.tensor([numbers[-CONTEXT:]]))[0, -1]
        numbers.append(int(torch.multinomial(torch.softmax(scores / 0.7, 0), 1)))
    return "".join(letters[number] for number in numbers)


if __name__ == "__main__":
    main()
