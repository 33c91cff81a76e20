"""One rank of the two-rank tests (started by test_two_ranks.py with torchrun's environment); writes what it saw."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_training import Logs, letter_reward, prompts_dataset
from transformers import TrainerCallback

from qerl.nn.surgery import quant_groups
from qerl.trainer.config import QeRLConfig
from qerl.trainer.parsing import build_configs
from qerl.trainer.run import Run
from qerl.trainer.trainer import QeRLTrainer


def settings(folder: Path, rows: int, **overrides: Any) -> dict[str, Any]:
    """Groups of four samples."""
    return {
        "output_dir": str(folder),
        "weights": "nvfp4",
        "use_cpu": True,
        "per_device_train_batch_size": rows,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_prompt_length": 64,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lora_r": 4,
        "sigma_start": 0.05,
        "sigma_end": 0.01,
        "num_stages": 3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 5,
        **overrides,
    }


class Gradients(TrainerCallback):
    """The gradient norm of this rank as the optimizer sees it (after the ranks were averaged), and its LoRA bytes."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:  # type: ignore[no-untyped-def]
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))


def lora(trainer: QeRLTrainer) -> dict[str, list[float]]:
    """The trained adapter as plain numbers."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    return {n: p.detach().flatten().tolist() for n, p in policy.named_parameters() if "lora_" in n}


def watch(trainer: QeRLTrainer) -> list[tuple]:
    """(step, prompts, completions) of every rollout of this rank."""
    seen, real = [], trainer.bridge.generate

    def generate(prompts, images, num_generations, profiler):  # type: ignore[no-untyped-def]
        result = real(prompts, images, num_generations, profiler)
        seen.append((trainer.state.global_step, [list(p) for p in prompts], [list(c) for c in result[1]]))
        return result

    trainer.bridge.generate = generate
    return seen


def train(model: str, folder: Path, rows: int, reward: Any = letter_reward, **overrides: Any) -> dict[str, Any]:
    """A run of two updates; what it sampled, its gradients and the adapter it left."""
    config = QeRLConfig(**settings(folder, rows, **overrides))
    logs, gradients = Logs(), Gradients()
    trainer = QeRLTrainer(model, reward, config, prompts_dataset(24), callbacks=[logs, gradients])
    seen = watch(trainer)
    groups = quant_groups(trainer.model).values()
    codes = [group.packed_tensor(0).codes.clone() for group in groups]
    if trainer.accelerator.process_index == 1:
        for group in groups:
            group._to_tiles()
            group.settle_layout = lambda: None  # the CPU would go back to rows
    trainer.train()
    # DDP gave this rank no bytes of the first one, which holds the same weights in another layout.
    assert all(torch.equal(group.packed_tensor(0).codes, c) for group, c in zip(groups, codes, strict=True))
    trainer.save_model(str(folder / "adapter"))
    result = {"seen": list(seen), "gradients": gradients.norms, "lora": lora(trainer), "loss": logs.values("loss")}
    result["filled"] = logs.values("dynamic_sampling/filled")
    result["rounds"] = logs.values("dynamic_sampling/rounds")
    result["zero"] = logs.values("frac_reward_zero_std")
    # two calls within one update, as the tool loop makes them: the rows of the second are another number on each rank
    trainer.model.train()
    prompt, rank = [5, 6, 7], trainer.accelerator.process_index
    trainer.args.parity_tokens = 0
    turns = [
        trainer.bridge.generate([prompt] * n, None, 4, torch.no_grad())[1] for n in (rows, rows + rank, rows + rank)
    ]
    return {**result, "turns": turns}


def half_constant(prompts: list, completions: list, **kwargs: object) -> list[float]:
    """A reward that is constant for prompts whose number is divisible by three."""
    spread = [float(sum(c[0]["content"].encode()) % 997) for c in completions]
    constant = [int(p[0]["content"].split()[1]) % 3 == 0 for p in prompts]
    return [1.0 if c else s for c, s in zip(constant, spread, strict=True)]


def whole_run(model: str, folder: Path) -> dict[str, Any]:
    """``Run`` with an evaluation before and after; counts the evaluations of this rank."""
    task = folder.parent / "sums.jsonl"
    values = settings(folder, 6, model=model, task=str(task), reward_workers=0, save_strategy="steps", save_steps=1)
    values["task_options"] = {"test_size": 4, "prompt": "plain"}
    run = Run(*build_configs(values), lambda line: None)
    evaluations, real = [], run._evaluate_here
    run._evaluate_here = lambda trainer, name, pool: (evaluations.append(name), real(trainer, name, pool))[1]
    summary = run.execute()
    return {"evaluations": evaluations, "steps": summary["steps"]}


def main(model: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    result = {
        "plain": train(model, folder / "plain", 8),
        # the second of three groups lies on both ranks
        "split": train(model, folder / "split", 6),
        "dynamic": train(model, folder / "dynamic", 6, half_constant, dynamic_sampling=True),
        "run": whole_run(model, folder / "run"),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
