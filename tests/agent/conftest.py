from tests.episodes import make_runner, task, tokenizer

__all__ = ["make_runner", "task", "tokenizer"]
