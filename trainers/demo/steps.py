"""The steps of the demos that need torch, each of which runs in a fresh process.

They are `processes`, `make ROOT [SEED]`, `make-prompts ROOT [SEED]`, `make-shuffled-prompts ROOT [SEED]`,
`make-tools ROOT [SEED]`, `make-pairs ROOT [SEED]`, `make-shapes ROOT [SEED]`, `answer MODEL DATA SHOWN`, `answer-tools MODEL DATA SHOWN`, `answer-shapes MODEL DATA SHOWN [PAGE]`,
`judge-dpo MODEL DATA SHOWN` and `judge-rm MODEL DATA SHOWN`.
"""

import sys
from pathlib import Path

from ..tasks.addition import accuracy, write_data, write_model, write_prompts
from ..tasks.calculator import tool_accuracy, write_tool_data, write_tool_model
from ..tasks.rising_digits import preference_accuracy, write_pairs
from ..tasks.shapes import shapes_accuracy, write_shapes, write_vision_model


def main(argv: list[str]) -> None:
    """Run one step."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if argv[0] == "make-shapes":
        write_shapes(Path(argv[1]) / "data", int(argv[2]))
        write_vision_model(Path(argv[1]) / "model", int(argv[2]))
    elif argv[0] == "answer-shapes":
        page = Path(argv[4]) if len(argv) > 4 else None
        print(shapes_accuracy(Path(argv[1]), Path(argv[2]), show=int(argv[3]), page=page))
    elif argv[0] == "make-tools":
        write_tool_data(Path(argv[1]) / "data", int(argv[2]))
        write_tool_model(Path(argv[1]) / "model", int(argv[2]))
    elif argv[0] == "answer-tools":
        print(tool_accuracy(Path(argv[1]), Path(argv[2]), show=int(argv[3])))
    elif argv[0].startswith("make"):
        root, seed = Path(argv[1]), int(argv[2]) if len(argv) > 2 else 0
        if argv[0] == "make-pairs":
            write_pairs(root / "data", seed)
        else:
            write_data(root / "data", seed)
        if argv[0] in ("make-prompts", "make-shuffled-prompts"):
            write_prompts(root / "data", seed, shuffled=argv[0] == "make-shuffled-prompts")
        write_model(root / "model", seed)
    elif argv[0].startswith("judge-"):
        logging.set_verbosity_error()
        print(preference_accuracy(Path(argv[1]), Path(argv[2]), reward=argv[0] == "judge-rm", show=int(argv[3])))
    elif argv[0] == "processes":
        import torch

        print(min(2, torch.cuda.device_count() or 2))
    else:
        print(accuracy(Path(argv[1]), Path(argv[2]), show=int(argv[3])))


if __name__ == "__main__":
    main(sys.argv[1:])
