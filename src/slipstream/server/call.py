"""A request for answers, from its checked body to the reply that waits for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from slipstream.core.errors import SlipstreamError
from slipstream.core.types import speculation_of
from slipstream.server.gate import log_fields
from slipstream.server.job import Job, Task
from slipstream.server.params import refusal, sampling_params, speculation
from slipstream.server.reply import Answer
from slipstream.server.schemas import CompletionRequest, Sampling
from slipstream.server.service import Served, Service
from slipstream.server.wire import Writer, text_of, usage

WARNING = "x-slipstream-warning"
MAX_LISTED, MAX_NAME = 20, 64
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Call:
    """One request to one of the endpoints that answer. Raises ApiError for what cannot be done."""

    def __init__(self, service: Service, body: Sampling, request: Request) -> None:
        self._service, self._body = service, body
        self._log = log_fields(request.scope)
        self.served = service.named(body.model)

    async def begin(self, asked: Sequence[Any], variables: Mapping[str, Any] | None = None) -> Job:
        """Queue the prompts. variables: for the chat template."""
        task = Task(
            sampling_params(self._body, self._service.limits),
            speculation(self._body, self.served.drafters),
            self._service.settings.deadline_s,
            bool(self._body.stream),
        )
        try:
            job = await self._service.start(task, asked, variables)
        except SlipstreamError as error:
            raise refusal(error, self._body) from None
        if self._service.settings.log_prompts:
            self._log["prompts"] = [request.prompt for request in job.requests]
        return job

    def reply(self, job: Job, writer: Writer) -> Response:
        """What waits for the answers and sends them."""
        self._log["answer"] = writer.id
        return Answer(job, writer, self._finish, warnings(self._body))

    async def _finish(self, job: Job) -> None:
        await self._service.finish(job)
        results = job.results()
        outputs = [output for result in results for output in result.outputs]
        counts = usage(results)
        self._log.update(
            prompt_tokens=counts["prompt_tokens"],
            completion_tokens=counts["completion_tokens"],
            finish_reasons=[output.finish_reason for output in outputs],
            first_token_s=None if job.first_at is None else round(job.first_at - job.arrived, 4),
            tokens_per_pass=round(speculation_of(results).tokens_per_pass, 3),
        )
        if self._service.settings.log_prompts:
            self._log["answers"] = [output.text for output in outputs]


def echoed(body: CompletionRequest, job: Job, served: Served) -> list[str]:
    """The prompts' texts where they are to be echoed, else nothing for each."""
    return [
        (text_of(served.vocabulary, request.prompt_token_ids) if request.prompt is None else request.prompt)
        if body.echo
        else ""
        for request in job.requests
    ]


def warnings(body: Sampling) -> dict[str, str]:
    """A header that lists fields that were sent and mean nothing here."""
    names = [name if _WORD.fullmatch(name) else ascii(name[:MAX_NAME]) for name in body.unknown[:MAX_LISTED]]
    return {WARNING: f"fields that are not known and were ignored: {', '.join(names)}"} if names else {}
