"""A server that behaves as SGLang 0.5.23 was seen to, around a model of transformers, one step of all requests at a time.

    python recorded_server.py --model-path DIR --port N ...

It loads the files that it is told to. A request keeps its caches unless it is retracted, so that a client that pauses otherwise
gets other tokens than the new weights make.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@dataclass
class Running:
    body: dict[str, Any]
    output: list[int] = field(default_factory=list)
    entries: dict[str, list[Any]] = field(default_factory=dict)
    """The lists of ``meta_info`` with an entry for each token."""
    events: list[tuple[str, int]] = field(default_factory=list)
    """The version before each change, and the number of tokens that had been generated."""
    cache: Any = None
    news: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)


class RecordedServer:
    """One server, in the running event loop."""

    def __init__(self, model: Path, *, incremental: bool = True, version: str = "default", token: str = "") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.incremental, self.version, self.token = incremental, version, token
        self.info: dict[str, Any] = {"dtype": "float32", "dp_size": 1, "max_req_input_len": 250, "version": "0.5.23"}
        self.paused = self.original_logprobs = self.spans_missing = self.blind = self.unflushed = False
        self.requests: dict[str, Running] = {}
        self.calls: list[str] = []
        self.before_load = asyncio.Event()
        self.before_load.set()

    async def start(self, port: int = 0) -> str:
        app = web.Application(middlewares=[self._authorised])
        app.add_routes([web.get(f"/{name}", self._get) for name in ("health", "server_info", "model_info")])
        app.add_routes([web.post("/{name}", self._post)])
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self._stepping = asyncio.create_task(self._steps())
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        self._stepping.cancel()
        await self._runner.cleanup()

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.token and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self.info if request.path == "/server_info" else {"weight_version": self.version})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        name, body = request.match_info["name"], await request.json()
        self.calls.append(name)
        return await getattr(self, f"_on_{name}")(request, body)

    async def _on_pause_generation(self, _: web.Request, body: dict[str, Any]) -> web.Response:
        self.paused = True
        if body["mode"] == "retract":
            for running in self.requests.values():
                running.cache = None
        return web.json_response({"status": "ok"})

    async def _on_continue_generation(self, _: web.Request, __: dict[str, Any]) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _on_abort_request(self, _: web.Request, body: dict[str, Any]) -> web.Response:
        for rid in [rid for rid in self.requests if rid.startswith(body["rid"])]:
            running = self.requests.pop(rid)
            chunk = self._chunk(running, {"type": "abort", "message": "Aborted", "status_code": None})
            if self.paused:  # as seen: the last token once more
                chunk["output_ids"] = running.output[-1:]
            running.news.put_nowait(chunk)
        return web.Response()

    async def _on_update_weights_from_disk(self, _: web.Request, body: dict[str, Any]) -> web.Response:
        await self.before_load.wait()
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files or self.blind:
            said = f"Failed to get weights iterator: Cannot find any model weights with `{body['model_path']}`."
            return web.json_response({"success": False, "message": said}, status=400)
        for file in files:
            self.model.load_state_dict(load_file(file), strict=False)
        self._change(body["weight_version"])
        if self.unflushed:
            self.unflushed = False
            return web.json_response({"success": False, "message": "Weights were updated, but ..."}, status=400)
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _on_generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        running = self.requests[body.setdefault("rid", f"probe-{len(self.calls)}")] = Running(body)
        chunk: dict[str, Any] = {"meta_info": {"finish_reason": None}}
        while chunk["meta_info"]["finish_reason"] is None:
            chunk = await running.news.get()
            with suppress(ConnectionResetError):
                await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        return answer

    def _change(self, version: str) -> None:
        for running in self.requests.values():
            if running.output:
                running.events.append((self.version, len(running.output)))
        self.version = version

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            for rid, running in list(self.requests.items()):
                if self.paused:
                    break
                self._step(running)
                done = len(running.output) == running.body["sampling_params"]["max_new_tokens"]
                if done:
                    del self.requests[rid]
                running.news.put_nowait(self._chunk(running, {"type": "length"} if done else None))

    @torch.inference_mode()
    def _step(self, running: Running) -> None:
        body, parameters, entries = running.body, running.body["sampling_params"], running.entries
        ids = [*body["input_ids"], *running.output]
        fresh = ids if running.cache is None else ids[-1:]
        output = self.model(torch.tensor([fresh]), past_key_values=running.cache, use_cache=True)
        running.cache, logits = output.past_key_values, output.logits[0].float()
        if body.get("logprob_start_len") == 0 and not running.output:
            scores = logits.log_softmax(-1)
            entries["input_token_logprobs"] = [[None, ids[0], None]] + [
                [float(row[token]), token, None] for row, token in zip(scores, ids[1:], strict=False)
            ]
        temperature = parameters["temperature"] or 1.0
        drawn = (logits[-1] / temperature).log_softmax(-1)
        support = (
            drawn.topk(parameters["top_k"]).indices if parameters.get("top_k", -1) > 0 else torch.arange(len(drawn))
        )
        token = (
            int(support[torch.multinomial(drawn[support].exp(), 1)])
            if parameters["temperature"]
            else int(drawn.argmax())
        )
        running.output.append(token)
        shown = logits[-1].log_softmax(-1) if self.original_logprobs else drawn
        best = shown.topk(body.get("top_logprobs_num") or 1)
        of_token = {
            "output_token_logprobs": [float(shown[token]), token, None],
            "output_top_logprobs": [[lp, each, None] for lp, each in zip(*map(torch.Tensor.tolist, best), strict=True)],
        }
        if body.get("return_sampling_mask"):
            of_token["output_token_sampling_mask"] = support.tolist()
            of_token["output_token_sampling_logprobs"] = drawn[support].log_softmax(-1).tolist()
        for name, value in of_token.items():
            entries.setdefault(name, []).append(value)

    def _chunk(self, running: Running, finish: dict[str, Any] | None) -> dict[str, Any]:
        first = len(running.output) - 1 if self.incremental else 0
        meta = {name: each if name.startswith("input") else each[first:] for name, each in running.entries.items()}
        meta |= {"finish_reason": finish, "completion_tokens": len(running.output), "weight_version": self.version}
        if finish is not None and not self.spans_missing:
            ends = [*running.events, (self.version, len(running.output))]
            starts = [0, *(end for _, end in ends)]
            meta["weight_versions"] = [
                {"version": version, "start": start, "end": end}
                for start, (version, end) in zip(starts, ends, strict=False)
            ]
        return {"output_ids": running.output[first:], "meta_info": meta}


async def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--model-path", "--weight-version", "--config"):
        parser.add_argument(option)
    parser.add_argument("--port", type=int)
    arguments, rest = parser.parse_known_args()
    assert {"--skip-tokenizer-init", "--incremental-streaming-output", "--dtype", "--context-length"} <= set(rest)
    token = Path(arguments.config).read_text().removeprefix("api-key: ").strip()
    server = RecordedServer(Path(arguments.model_path), version=arguments.weight_version, token=token)
    server.info["pid"] = os.getpid()
    await server.start(arguments.port)
    print("The server is fired up and ready to roll!", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
