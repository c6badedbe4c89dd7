"""One HTTP response of beam search: its rounds of engine requests, and the best sequences as choices."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from windlass.core.types import Timeline
from windlass.errors import EngineError
from windlass.serve.desk import Ticket
from windlass.serve.formatters import usage
from windlass.serve.generation_services import GenerationServices
from windlass.serve.keys import Sender
from windlass.serve.prepare import Prepared
from windlass.serve.protocol import GenerationRequest
from windlass.serve.response import ResponseFormat, cancel_on_disconnect
from windlass.serve.served_completion import ServedCompletion, TokenTimer
from windlass.serve.trace_store import Entry
from windlass.text.beam_search import BeamSearch, BeamSearchParams, output_of
from windlass.text.completion import Completion
from windlass.text.request_builder import RequestBuilder


class BeamResponse:
    """Searches the continuations of all prompts of one HTTP request at the same time."""

    def __init__(
        self,
        services: GenerationServices,
        prepared: Prepared,
        *,
        body: GenerationRequest,
        response_format: ResponseFormat,
        ticket: Ticket,
        sender: Sender,
    ) -> None:
        self._services = services
        self._prepared = prepared
        self._format = response_format
        self._ticket = ticket
        report, tokenizer = services.client.report, services.card.tokenizer
        builder, n = RequestBuilder(services.card, report), prepared.sampling.n
        self._searches = [
            BeamSearch(
                request,
                _params(
                    body, prepared, builder.max_new_tokens(len(request.prompt), prepared.sampling)
                ),
                eos_ids=tokenizer.eos_ids,
                vocab_size=report.vocab_size,
            )
            for request in prepared.requests[::n]
        ]
        self._served = [
            ServedCompletion(
                Completion(index, request, tokenizer),
                TokenTimer(services.metrics, ticket.began, ticket.summary.tenant),
                None,
            )
            for index, request in enumerate(prepared.requests)
        ]
        ticket.served = self._served
        self._price = services.price if body.include_cost else None
        self._entry = ticket.entry = Entry(
            response_id=prepared.response_id,
            owner=sender.tenant.name,
            key_id=sender.key_id,
            began=ticket.began,
            request_ids=tuple(request.request_id for request in prepared.requests[::n]),
            path=ticket.path,
            adapter=prepared.requests[0].adapter,
            fallback=ticket.summary.fallback,
            fallback_model=ticket.summary.fallback_model,
            more_rounds=True,
        )

    async def send_whole(self, request: Request) -> Response:
        """Wait for all sequences and return one JSON body."""
        body = await cancel_on_disconnect(request.receive, self._collect())
        self._ticket.keep_response(body)
        self._ticket.end("success")
        return Response(body, media_type="application/json")

    async def _collect(self) -> bytes:
        traces, entry = self._services.traces, self._entry
        traces.open(entry)
        tasks = [asyncio.create_task(self._run(search)) for search in self._searches]
        try:
            timelines = await asyncio.gather(*tasks)
        except EngineError:
            traces.mark_lost(entry)
            raise
        finally:
            for task in tasks:
                task.cancel()
            traces.end_rounds(entry)
        cost = None
        if self._price is not None:
            arrived = await traces.wait_closed(entry)
            cost = None if arrived is None else self._price.of(arrived)
        n, deltas = self._prepared.sampling.n, {}
        for i, (search, timeline) in enumerate(zip(self._searches, timelines, strict=True)):
            for at, finished in enumerate(search.results()[:n], start=i * n):
                served = self._served[at]
                output = output_of(finished, served.completion.request.request_id)
                delta = served.feed(output._replace(timeline=timeline))
                assert delta is not None, "the whole completion is one delta"
                deltas[at] = delta
        found = [self._served[i] for i in deltas]
        numbers = usage(self._prepared, found, cost)
        return msgspec.json.encode(
            self._format.whole(deltas, [each.completion for each in found], numbers)
        )

    async def _run(self, search: BeamSearch) -> Timeline | None:
        """Search until the end; returns the timeline of the first round, which computes the prompt."""
        first: Timeline | None = None
        while not search.done:
            async for output in self._services.client.generate(*search.requests()):
                first = first or output.timeline
                search.receive(output)
        return first


def _params(body: GenerationRequest, prepared: Prepared, max_tokens: int) -> BeamSearchParams:
    sampling = prepared.sampling
    return BeamSearchParams(
        beam_width=body.best_of or sampling.n,
        max_tokens=max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
    )
