"""What the trainer is given, made ready for TRL: the model, its tokenizer, the config of its adapter."""

from pathlib import Path

from peft import LoraConfig
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qerl.nn.loading import eos_token_ids, load_model
from qerl.nn.lora import LoraQuantLinear, check_lora_config, prepare_lora_config
from qerl.trainer.config import ConfigError, QeRLConfig


def load_policy(
    model: str | Path | PreTrainedModel | nn.Module, args: QeRLConfig, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """The model (loaded where ``model`` is a folder) and its tokenizer, with a pad token and all EOS ids (mutates the
    tokenizer and the generation config of a model that is given).

    Raises:
        ConfigError: a tokenizer with neither a pad nor an EOS token.
    """
    folder = model if isinstance(model, (str, Path)) else model.config.name_or_path
    if isinstance(model, (str, Path)):
        model = load_model(
            model,
            weights=args.weights,
            head=args.head,
            dtype=args.dtype,
            device="cpu" if args.use_cpu else args.device,
            trust_remote_code=args.trust_remote_code,
        )
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ConfigError("the tokenizer has neither a pad nor an EOS token: set tokenizer.pad_token")
    # TRL reads the EOS ids from the generation config alone; every id that ends a sample must be in it.
    eos_ids = eos_token_ids(model, tokenizer.eos_token_id)
    causal_model(model).generation_config.eos_token_id = list(eos_ids)
    model.generation_config.eos_token_id = list(eos_ids)
    return model, tokenizer


def adapter_config(model: nn.Module, args: QeRLConfig, given: LoraConfig | None) -> LoraConfig | None:
    """The config that TRL shall wrap ``model`` with: ``given``, or that of ``args``; None where it is wrapped already.

    Raises:
        ConfigError: an adapter that cannot be trained.
    """
    if any(isinstance(m, LoraQuantLinear) for m in model.modules()):
        for config in model.peft_config.values():
            check_lora_config(config)
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "the model has an adapter but nothing to train: load it with load_adapter(..., is_trainable=True)"
            )
        return None
    if given is None:
        given = LoraConfig(
            r=args.lora_r,
            lora_alpha=args.lora_alpha,
            target_modules=args.lora_target_modules or "all-linear",
            task_type="CAUSAL_LM",
        )
    return prepare_lora_config(given, model)


def causal_model(policy: nn.Module) -> PreTrainedModel:
    """The model under an adapter, or the model itself."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy
