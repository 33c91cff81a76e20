"""``python -m qerl.evaluation.lm_eval_cli``: the command line of lm-evaluation-harness with the model ``qerl`` known.

All options are the harness's. Needed with release 0.4.13, which has no discovery of plugins; see
:mod:`qerl.evaluation.lm_eval_adapter`.
"""

import lm_eval.models  # noqa: F401 - its table of models is filled on import, and only while the registry is empty
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry


def register() -> None:
    """Make ``--model qerl`` known to the harness (changes its registry); the adapter is imported when it is used."""
    if "qerl" not in model_registry:
        model_registry.register("qerl", target="qerl.evaluation.lm_eval_adapter:QerlLM")


def main() -> None:
    """Run the harness's command line on ``sys.argv``."""
    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
