"""Ollama's endpoints that list and describe models."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256

from starlette.requests import Request
from starlette.responses import Response

from windlass.serve.bodies import names_unknown_fields, read_as, reply
from windlass.serve.formatters import Json
from windlass.serve.ollama_api import OllamaShowRequest, model_name
from windlass.serve.services import Services


class OllamaRoutes:
    """The endpoints /api/tags and /api/show."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tags(self, request: Request) -> Response:
        """The model and its adapters, as far as the request's tenant may use them."""
        card, tenant = self._services.card, self._services.keys.tenant_of(request)
        own = [name for name in (card.name, *card.aliases) if tenant.may_use("", (name,))]
        adapters = self._services.client.adapters.folders
        names = own + [name for name in adapters if tenant.may_use(name, ())]
        started = datetime.fromtimestamp(self._services.started, UTC).isoformat()
        return reply(
            {
                "models": [
                    {
                        "name": name,
                        "model": name,
                        "modified_at": started,
                        "size": self._services.client.report.memory.get("weights", 0),
                        "digest": sha256(name.encode()).hexdigest(),
                        "details": self._details(),
                    }
                    for name in names
                ]
            }
        )

    @names_unknown_fields
    async def show(self, request: Request) -> Response:
        body = await read_as(request, OllamaShowRequest.read, self._services)
        tenant = self._services.keys.tenant_of(request)
        self._services.preparer.adapter_of(model_name(body.model or body.name), tenant)
        card = self._services.card
        capabilities = ["completion"] if card.chat_template is None else ["completion", "tools"]
        return reply(
            {
                "modelfile": "",
                "parameters": "",
                "template": card.chat_template or "",
                "details": self._details(),
                "model_info": {
                    "general.architecture": card.architecture,
                    "general.name": card.name,
                    f"{card.architecture}.context_length": self._services.client.report.max_model_len,
                },
                "capabilities": capabilities,
            }
        )

    def _details(self) -> Json:
        family = self._services.card.architecture
        return {
            "parent_model": "",
            "format": "gguf" if self._services.card.path.endswith(".gguf") else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        }
