"""Records what TRL computes on the batch of `case.py`: losses, gradient norms and metrics, into `trl_numbers.json`.

In an environment of its own, from the repository's root:

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0
    /tmp/trl/bin/python tests/recorded/trl_numbers.py

CI compares the file with this program's numbers and never runs TRL.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

HERE = Path(__file__).parent


def load(path: Path) -> Any:
    """A module by its file: this package is not installed here."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


case = load(HERE / "case.py")
tokenizer = load(HERE.parents[1] / "trainers" / "tasks" / "addition.py").make_tokenizer()


def measure(trainer: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
    """Loss, gradient norm and metrics of one batch of all rows."""
    model.train().zero_grad()
    rows = [trainer.train_dataset[i] for i in range(len(case.PAIRS))]
    batch = trainer.data_collator(rows)
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    norm = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
    stored = metrics(batch) if metrics else {k: v[-1] for k, v in trainer._metrics["train"].items() if v}
    told = {k: float(v) for k, v in stored.items()}
    return {"loss": float(loss), "grad_norm": float(norm), "metrics": told}


def settings(kind: Any, folder: Path, **more: Any) -> Any:
    """A trainer's arguments."""
    common = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": len(case.PAIRS),
        "report_to": [],
        "use_cpu": True,
    }
    return kind(**common, bf16=False, gradient_checkpointing=False, **more)


def main() -> None:
    """Record."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.write_models(folder, tokenizer)

        def policy(which: str = "policy") -> Any:
            return AutoModelForCausalLM.from_pretrained(folder / which, dtype=torch.float32)

        pairs = Dataset.from_list(case.PAIRS)
        for label, more in case.PAIR_LOSSES.items():
            model = policy()
            args = settings(trl.DPOConfig, folder, beta=case.BETA, max_length=None, **more)
            trainer = trl.DPOTrainer(
                model=model, ref_model=policy("reference"), args=args, train_dataset=pairs, processing_class=tokenizer
            )
            found[label] = measure(trainer, trainer.model)
        from trl.experimental.cpo import CPOConfig, CPOTrainer
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        for label, loss, more in (
            ("cpo", "sigmoid", {}),
            ("cpo_smoothed", "sigmoid", {"label_smoothing": 0.2}),
            ("simpo", "simpo", {"cpo_alpha": 0.0, "simpo_gamma": 0.5}),
        ):
            args = settings(
                CPOConfig, folder, beta=case.BETA, loss_type=loss, max_length=64, remove_unused_columns=False, **more
            )
            trainer = CPOTrainer(model=policy(), args=args, train_dataset=pairs, processing_class=tokenizer)
            found[label] = measure(trainer, trainer.model, lambda b, t=trainer: t.get_batch_loss_metrics(t.model, b)[1])
        args = settings(ORPOConfig, folder, beta=case.BETA, max_length=64, remove_unused_columns=False)
        trainer = ORPOTrainer(model=policy(), args=args, train_dataset=pairs, processing_class=tokenizer)
        found["orpo"] = measure(trainer, trainer.model, lambda b, t=trainer: t.get_batch_loss_metrics(t.model, b)[1])

        args = settings(
            trl.KTOConfig,
            folder,
            beta=case.BETA,
            desirable_weight=1.0,
            undesirable_weight=1.5,
            max_length=None,
            train_sampling_strategy="sequential",
        )
        trainer = trl.KTOTrainer(
            model=policy(),
            ref_model=policy("reference"),
            args=args,
            train_dataset=Dataset.from_list(case.unpaired()),
            processing_class=tokenizer,
        )
        found["kto"] = measure(trainer, trainer.model)

        for label, more, rows in (
            ("reward", {}, case.PAIRS),
            ("reward_margin", {}, [{**p, "margin": m} for p, m in zip(case.PAIRS, case.MARGINS, strict=True)]),
            ("reward_centered", {"center_rewards_coefficient": 0.1}, case.PAIRS),
        ):
            model = AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype=torch.float32)
            args = settings(trl.RewardConfig, folder, max_length=None, **more)
            trainer = trl.RewardTrainer(
                model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
            )
            found[label] = measure(trainer, trainer.model)
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    (HERE / "trl_numbers.json").write_text(json.dumps({"versions": versions, "numbers": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
