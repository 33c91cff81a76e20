"""Bad configurations are named errors before anything is loaded; fields are all read; parsing suggests names."""

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from trl import GRPOConfig

import qerl
from qerl.evaluation.run_log import RunWriter
from qerl.trainer.config import ConfigError, QeRLConfig
from qerl.trainer.parsing import UnknownFieldError, build_configs, parse_overrides, read_yaml, split_fields
from qerl.trainer.run_config import RunConfig

Make = Callable[..., QeRLConfig]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_generations", 1, "num_generations=1: a group of one has no baseline"),  # case 15
        ("use_vllm", True, "use rollout_backend"),
        ("vllm_gpu_memory_utilization", 0.9, "use kv_cache_gb"),
        ("vllm_max_model_length", 100, "use max_prompt_length and max_completion_length"),
        ("bf16", True, "set dtype='bfloat16'"),
        ("top_p", 0.9, "top_p: training on a truncated distribution"),
        ("top_k", 50, "top_k: training on a truncated distribution"),
        ("min_p", 0.1, "min_p: training on a truncated distribution"),
        ("repetition_penalty", 1.1, "repetition_penalty must be 1"),
        ("temperature", 0.0, "temperature=0.0"),
        ("weights", "fp4", "weights='fp4' is unknown; choose from auto, bf16, nvfp4, nf4, mxfp4"),
        ("aqn_schedule", "exp", "aqn_schedule='exp' is unknown"),
        ("aqn_scope", "train", "aqn_scope='train' is unknown"),
        ("num_stages", 2, "num_stages=2 must be at least 3"),
        ("sigma_end", -1.0, "sigma_end=-1.0 must be positive"),
        ("rollout_backend", "vllm", "rollout_backend='vllm' is unknown"),
        ("overlong_prompts", "truncate", "overlong_prompts='truncate' is unknown"),
        ("lora_r", 0, "lora_r=0 must be at least 1"),
        ("speculative_tokens", -1, "speculative_tokens=-1 must be at least 0"),
        ("speculative_tokens", 65, "speculative_tokens=65 must be at most 64"),
        ("speculative_history", 9, "speculative_history=9 keeps .* speculative_tokens=0 guesses nothing: set"),
        ("speculative_max_batch", 0, "speculative_max_batch=0 must be at least 1"),
        ("speculative_history", -1, "speculative_history=-1 must be at least 0"),
    ],
)
def test_refused_with_what_to_change(field: str, value: object, words: str, config: Make) -> None:
    with pytest.raises(ValueError, match=words):
        config(**{field: value})


def test_drafts_need_the_engine(config: Make) -> None:
    with pytest.raises(ConfigError, match="speculative_tokens=4 needs the engine: set rollout_backend"):
        config(speculative_tokens=4, rollout_backend="transformers")


def test_checkpoints_must_fall_between_generations(config: Make) -> None:
    """Buffered completions are not checkpointed."""
    with pytest.raises(ConfigError, match="save_steps=3: save_steps must be a multiple of 4"):
        config(save_strategy="steps", save_steps=3, num_iterations=4)
    assert config(save_strategy="steps", save_steps=8, num_iterations=4).updates_per_generation == 4
    assert config(steps_per_generation=4, gradient_accumulation_steps=2).updates_per_generation == 2


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    args = QeRLConfig(output_dir=str(tmp_path), per_device_train_batch_size=8)
    assert (args.learning_rate, args.num_generations, args.epsilon, args.epsilon_high) == (1e-5, 8, 0.2, 0.28)
    assert (args.beta, args.temperature, args.lora_r, args.loss_type) == (0.0, 1.0, 32, "dapo")
    assert (args.sigma_start, args.sigma_end, args.num_stages) == (1e-2, 5e-4, 10)
    assert (args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max) == ("token_truncate", 2.0)


def test_every_field_of_ours_is_read_somewhere() -> None:
    """A field that nothing reads is a lie to the user (the reference's --random-state)."""
    inherited = {f.name for f in dataclasses.fields(GRPOConfig)}
    ours = {f.name for f in dataclasses.fields(QeRLConfig) if f.name not in inherited}
    ours |= {f.name for f in dataclasses.fields(RunConfig)}
    read: set[str] = set()
    for path in Path(qerl.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        read |= {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
    assert ours - read == set()


def test_command_line_values() -> None:
    arguments = ["--learning_rate", "1e-5", "--max-steps=7", "--lora_target_modules", "[q_proj, v_proj]", "--bf16"]
    assert parse_overrides([*arguments, "--sigma_end", "-1"]) == {
        "learning_rate": 1e-5,
        "max_steps": 7,
        "lora_target_modules": ["q_proj", "v_proj"],
        "bf16": True,
        "sigma_end": -1,
    }
    words = parse_overrides(["--save_strategy", "no", "--a", "on", "--b", "false", "--c", "0.1.25", "--d", "-2.5"])
    assert words == {"save_strategy": "no", "a": "on", "b": False, "c": "0.1.25", "d": -2.5}
    with pytest.raises(ValueError, match="unexpected argument 'oops'"):
        parse_overrides(["oops"])


def test_unknown_fields_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownFieldError, match="unknown field 'learning_rte'; did you mean 'learning_rate'"):
        split_fields({"learning_rte": 1}, RunConfig, QeRLConfig)
    with pytest.raises(UnknownFieldError, match="help-all"):
        split_fields({"xyzzy": 1}, RunConfig)


def test_recipe_and_overrides_meet(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: m\ntask: gsm8k\nlearning_rate: 3e-4\noutput_dir: {tmp_path}\nmax_steps: 5\n")
    values = read_yaml(recipe) | parse_overrides(["--max_steps", "9"])
    run, args = build_configs(values)
    assert (run.model, run.task, args.learning_rate, args.max_steps) == ("m", "gsm8k", 3e-4, 9)
    (tmp_path / "bad.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match="must hold `field: value` lines"):
        read_yaml(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rewards": ["corectness"]}, "corectness"),
        ({"rewards": []}, "choose from correctness"),
        ({"reward_workers": -1}, "reward_workers=-1"),
        ({"reward_deadline": 0}, "reward_deadline=0"),
    ],
)
def test_run_config_refuses(values: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunConfig(**values)


def test_shipped_recipes_parse(tmp_path: Path) -> None:
    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        run, args = build_configs({**read_yaml(recipe), "output_dir": str(tmp_path)})
        assert run.model and run.task and args.max_completion_length > 0, recipe.name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_steps": "abc"}, "max_steps takes a whole number, got 'abc'"),
        ({"max_steps": True}, "max_steps takes a whole number, got True"),
        ({"max_steps": 2.5}, "max_steps takes a whole number, got 2.5"),
        ({"learning_rate": "fast"}, "learning_rate takes a number, got 'fast'"),
        ({"use_cpu": "maybe"}, "use_cpu takes true or false, got 'maybe'"),
        ({"loss_type": "foo"}, "loss_type='foo' is unknown; choose from grpo, dapo"),
        ({"per_device_train_batch_size": 6}, "6 samples hold no whole number of groups of num_generations=8"),
        ({"task": 5}, "task takes a word, got 5"),
    ],
)
def test_values_of_the_wrong_kind_are_named(values: dict, words: str, tmp_path: Path) -> None:
    base = {"model": "m", "output_dir": str(tmp_path), "per_device_train_batch_size": 8}
    with pytest.raises(ValueError, match=words):
        build_configs({**base, **values})
    assert build_configs({**base, "max_steps": 5, "learning_rate": 1, "num_generations": 4})[1].max_steps == 5


@pytest.mark.parametrize(
    ("yaml_line", "arguments", "expected"),
    [
        ("", ["--resume_from_checkpoint", "true"], "true"),
        ("", ["--resume_from_checkpoint=true"], "true"),
        ("", ["--resume_from_checkpoint", "True"], "true"),
        ("", ["--resume_from_checkpoint"], "true"),
        ("", ["--resume-from-checkpoint", "--max_steps", "3"], "true"),
        ("resume_from_checkpoint: true", [], "true"),
        ("resume_from_checkpoint: true", ["--resume_from_checkpoint", "false"], None),
        ("resume_from_checkpoint: false", [], None),
        ("", ["--resume_from_checkpoint=runs/a/checkpoint-4"], "runs/a/checkpoint-4"),
        ("resume_from_checkpoint: runs/a/checkpoint-4", [], "runs/a/checkpoint-4"),
    ],
)
def test_resume_as_people_write_it(yaml_line: str, arguments: list[str], expected: str | None, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: m\noutput_dir: {tmp_path}\n{yaml_line}\n")
    _, args = build_configs(read_yaml(recipe) | parse_overrides(arguments))
    assert args.resume_from_checkpoint == expected


@pytest.mark.parametrize("lines", ["", "generation_batch_size: 32", "steps_per_generation: 2", "num_iterations: 2"])
def test_the_config_of_a_run_is_a_recipe_of_it(lines: str, tmp_path: Path) -> None:
    """Derived fields (generation_batch_size, gradient_checkpointing, ...) must not come back as given ones."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: m\ngradient_accumulation_steps: 2\nsave_steps: 4\nlearning_rate: 1e-6\n{lines}\n")
    first = build_configs(read_yaml(recipe) | {"output_dir": str(tmp_path / "a"), "resume_from_checkpoint": True})
    writer = RunWriter(tmp_path / "a")
    writer.write_config({**dataclasses.asdict(first[0]), **first[1].given_values()})
    overrides = parse_overrides(["--output_dir", str(tmp_path / "b")])
    second = build_configs(read_yaml(tmp_path / "a" / "config.yaml") | overrides)
    assert second[0] == first[0]
    before, after = ({f.name: getattr(a, f.name) for f in dataclasses.fields(a)} for _, a in (first, second))
    different = {name for name in before if before[name] != after[name]}
    assert different == {"output_dir", "resume_from_checkpoint"}
    assert after["generation_batch_size"] == (32 if lines.startswith("generation") else 16)
