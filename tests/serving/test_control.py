from __future__ import annotations

import asyncio

import pytest

from agentrl.errors import ServingError
from agentrl.serving import supervisor
from agentrl.serving.control import ControlPlane, parse_metrics
from tests.serving.scripted_server import scripted_server

METRICS = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a } odd name"} 0.75
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 1.28e+06
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="policy"} 3.0
vllm:num_requests_waiting 2
vllm:nonsense{engine="0"} 1-2e
vllm:kv_cache_usage_perc{engine="2"} NaN
python_info{version="3"} 1.0
"""


def test_metrics_are_parsed_and_other_lines_ignored() -> None:
    assert parse_metrics(METRICS) == {
        "vllm:kv_cache_usage_perc": 0.75,  # the fuller of two engines
        "vllm:prefix_cache_hits_total": 1.28e6,
        "vllm:num_requests_waiting": 2.0,
    }


@pytest.mark.parametrize(
    ("answer", "share"), [((200, METRICS.encode()), 0.75), ((404, {}), None), ((200, b"vllm:kv_cache_usage_perc 7\n"), None)]
)
async def test_a_server_without_cache_metrics_admits_episodes(answer: object, share: float | None) -> None:
    class Server:
        def __init__(self, url: str) -> None:
            self.control = ControlPlane(url)

    async with scripted_server(lambda call: answer) as script:
        server = Server(script.url)
        use = await supervisor._cache_use(server, 5)  # type: ignore[arg-type]
        await server.control.close()
        with pytest.raises(ServingError):
            await server.control.metrics()
    assert (None if use is None else (use.reading, use.shares)) == (None if share is None else (5, (share,)))


async def test_metrics_are_decoded_as_utf_8() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=hex\r\nContent-Length: {len(METRICS.encode())}\r\n\r\n"
        writer.write(head.encode() + METRICS.encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    control = ControlPlane(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        assert (await control.metrics())["vllm:kv_cache_usage_perc"] == 0.75
    finally:
        await control.close()
        server.close()
