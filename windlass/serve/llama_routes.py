"""llama-server's endpoints that describe the server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from windlass.core.sampling import SamplingParams
from windlass.serve.bodies import reply
from windlass.serve.formatters import Json
from windlass.serve.llama_api import DEFAULTS
from windlass.serve.llama_format import generation_settings
from windlass.serve.openai_format import FINGERPRINT
from windlass.serve.services import Services


class LlamaRoutes:
    """The endpoints /props and /slots."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def props(self, request: Request) -> Response:
        services = self._services
        services.preparer.adapter_of(None, services.keys.tenant_of(request))  # raises ModelNotFound
        card, special = services.card, services.card.special_tokens
        return reply(
            {
                "default_generation_settings": {
                    "params": self._settings(),
                    "n_ctx": self._num_context,
                },
                "total_slots": services.client.max_num_seqs,
                "model_alias": card.name,
                "model_path": card.path,
                "modalities": {"vision": False, "video": False, "audio": False},
                "chat_template": card.chat_template or "",
                "chat_template_caps": {},
                "bos_token": special.get("bos_token", ""),
                "eos_token": special.get("eos_token", ""),
                "build_info": FINGERPRINT,
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": True,
                "is_sleeping": services.sleeper.state != "awake",
            }
        )

    async def slots(self, request: Request) -> Response:
        """The slots of the engine; which request has which slot is not known here."""
        client = self._services.client
        num_slots, num_running = client.max_num_seqs, client.backlog.num_running
        if num_running >= num_slots and request.query_params.get("fail_on_no_slot"):
            error = {"code": 503, "message": "no slot available", "type": "unavailable_error"}
            return reply({"error": error}, 503)
        settings = self._settings()
        return reply(
            [
                {
                    "id": i,
                    "id_task": -1,
                    "n_ctx": self._num_context,
                    "speculative": False,
                    "is_processing": i < num_running,
                    "params": settings,
                    "next_token": [{"has_next_token": i < num_running, "n_remain": -1}],
                }
                for i in range(num_slots)
            ]
        )

    @property
    def _num_context(self) -> int:
        return self._services.client.report.max_model_len

    def _settings(self) -> Json:
        defaults = {**DEFAULTS, "max_tokens": None, **self._services.card.default_sampling}
        return generation_settings(SamplingParams(**defaults))
