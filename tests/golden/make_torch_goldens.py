"""Writes files as `torch.save` does, for the reader that has no torch, and what they hold as NumPy arrays.

Needs the `oracle` extra. Run from the repository root: `python tests/golden/make_torch_goldens.py`.
"""

from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent / "torch"


def main() -> None:
    torch.manual_seed(0)
    table = torch.randn(5, 32)
    embedding = table[3].to(torch.bfloat16)
    FOLDER.mkdir(exist_ok=True)
    torch.save({"mask_token_id": 23, "embedding": embedding}, FOLDER / "mapping.pt")
    torch.save(table[3][None], FOLDER / "row.pt")  # with the whole table's numbers
    torch.save(torch.nn.Parameter(table[3].half()), FOLDER / "parameter.pt")
    torch.save(table.T, FOLDER / "columns.pt")
    torch.save(torch.nn.Linear(2, 2), FOLDER / "module.pt")
    np.save(FOLDER / "row.npy", table[3].numpy())


if __name__ == "__main__":
    main()
