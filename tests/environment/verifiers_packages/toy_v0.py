"""An environment for verifiers 0.3 as its documentation shows."""

import verifiers as vf
from datasets import Dataset


def exact(completion, answer, **kwargs) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment(count: int = 8, turns: int = 1) -> vf.Environment:
    rows = [{"question": f"{a} + {a} = ?", "answer": str(2 * a)} for a in range(count)]
    dataset, heldout = Dataset.from_list(rows), Dataset.from_list([{"question": "50 + 50 = ?", "answer": "100"}])
    return vf.SingleTurnEnv(
        dataset=dataset, eval_dataset=heldout, system_prompt="Answer with a number.", rubric=vf.Rubric(funcs=[exact], weights=[1.0])
    )
