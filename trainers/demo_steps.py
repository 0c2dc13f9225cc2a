"""Steps of the demo that need torch, each in a fresh process: `processes`, `make ROOT`, `answer MODEL DATA SHOWN`."""

import sys
from pathlib import Path

from .data.demo import accuracy, write_data, write_model

SEED = 0


def main(argv: list[str]) -> None:
    """Run one step."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if argv[0] == "make":
        write_data(Path(argv[1]) / "data", SEED)
        write_model(Path(argv[1]) / "model", SEED)
    elif argv[0] == "processes":
        import torch

        print(min(2, torch.cuda.device_count() or 2))
    else:
        print(accuracy(Path(argv[1]), Path(argv[2]), show=int(argv[3])))


if __name__ == "__main__":
    main(sys.argv[1:])
