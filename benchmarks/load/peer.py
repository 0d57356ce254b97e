"""Runs the same episodes with the package `verifiers` 0.4, in the Python environment that has it.

    PEER/bin/python benchmarks/load/peer.py --script SCRIPT.json --tokenizer FOLDER --client train --port PORT

Uses the fastest known settings: the harness is a loop in the driver process, which the package allows, instead of a program started for
each episode. The tool is a function in that loop, instead of an MCP server. All episodes share one interception server and one runtime. The
loop uses aiohttp with persistent connections. `--client train` records exact token ids over `/inference/v1/generate`, as agentrl does;
`--client eval` relays chat completions, without tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig

WARM = 4


class LoopHarness(Harness[HarnessConfig]):
    """The turn loop: requests a completion, calls the tool and appends its output, until the model calls no tool."""

    SUPPORTS_RESUME = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: HarnessConfig, http: aiohttp.ClientSession, schema: dict[str, Any], output: str) -> None:
        super().__init__(config)
        self._http, self._schema, self._output = http, schema, output

    async def look(self, at: str) -> str:
        return self._output

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any) -> ProgramResult:
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": ctx.model, "messages": messages, "tools": [self._schema]}
            async with self._http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                message = (await answer.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ProgramResult(exit_code=0, stdout="", stderr="")
            for call in message["tool_calls"]:
                output = await self.look(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})


class Look(vf.Task):
    @vf.reward
    async def done(self, trace: vf.Trace) -> float:
        return 1.0


async def measure(args: argparse.Namespace, script: dict[str, Any]) -> dict[str, float]:
    url = f"http://127.0.0.1:{args.port}"
    if args.client == "train":
        client: Any = TrainClientConfig(
            base_url=f"{url}/v1", api_key_var="NOT_SET", renderer=Qwen3RendererConfig(), renderer_model_name=args.tokenizer
        )
    else:
        client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="NOT_SET")
    config = vf.AgentConfig(model="policy", client=client, runtime=SubprocessConfig(), harness={"id": "null"})
    task = Look(vf.TaskData(idx=0, prompt=script["prompt"]))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, InterceptionServer() as interception:
        agent = vf.Agent(config, interception=interception)
        agent.harness = LoopHarness(agent.harness.config, http, script["schema"], script["shown"])
        async with agent.provision(task) as runtime:
            slots = asyncio.Semaphore(args.at_once)

            async def run_episode() -> None:
                async with slots:
                    trace = await agent.run(task, runtime=runtime)
                if not trace.ok or trace.num_turns != args.turns:
                    raise RuntimeError(f"an episode failed after {trace.num_turns} turns: {trace.errors}")

            await asyncio.gather(*(run_episode() for _ in range(WARM)))
            gc.collect()
            cpu = time.process_time()
            await asyncio.gather(*(run_episode() for _ in range(args.episodes)))
            cpu_s, wall = time.process_time() - cpu, time.perf_counter()
            for _ in range(args.alone):
                await run_episode()
            wall_s = time.perf_counter() - wall
    return {"cpu_ms": 1000 * cpu_s / (args.episodes * args.turns), "alone_ms": 1000 * wall_s / (args.alone * args.turns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--client", choices=("train", "eval"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--alone", type=int, default=8)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(json.dumps(asyncio.run(measure(args, json.loads(args.script.read_text())["episode"]))))


if __name__ == "__main__":
    main()
