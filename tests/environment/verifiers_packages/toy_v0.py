"""An environment for verifiers 0.3 as shown in its documentation, with faults."""

import verifiers as vf
from datasets import Dataset


def exact(completion, answer, **kwargs) -> float:
    if answer == "raises":
        raise ValueError("the answer key is missing")
    answers = [message["content"] for message in completion if message["role"] == "assistant"]
    return float("nan") if answer == "nan" else float(answers[-1] == answer)


class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        if state["answer"] == "breaks":
            raise vf.InfraError("the world broke")
        if messages[-1]["content"] == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
        return [{"role": "user", "content": "Wrong. Again."}]


def compare(completions, **kwargs) -> list[float]:
    return [0.0 for _ in completions]


def load_environment(count: int = 8, kind: str = "sums") -> vf.Environment:
    rows = [{"question": f"{a} + {a} = ?", "answer": str(2 * a)} for a in range(count)]
    if kind == "group":
        return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[compare]))
    heldout = Dataset.from_list([{"question": "50 + 50 = ?", "answer": "100"}])
    rows += [{"question": text, "answer": text} for text in ("raises", "nan", "breaks")]
    rubric = vf.Rubric(funcs=[exact], weights=[1.0])
    return Talk(dataset=Dataset.from_list(rows), eval_dataset=heldout, system_prompt="Answer with a number.", rubric=rubric)
