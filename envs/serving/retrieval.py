"""Search-R1's retrieval server: `POST /retrieve` with `queries` (a list) or SkyRL's `query` (one text)."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from envs.search.documents import Document, Retriever
from envs.serving.host import Host, application, read_body


class Query(BaseModel):
    """What a client asks for."""

    model_config = ConfigDict(strict=True)
    queries: list[str] | None = Field(default=None, min_length=1, max_length=1_000)
    query: str | None = None
    topk: int | None = Field(default=None, ge=1, le=100)
    """Documents per query; 3 where it does not say."""
    return_scores: bool = False


def retrieval_app(host: Host, retriever: Retriever, *, bound_to: str) -> Starlette:
    """The server over one retriever. Requests that do not fit are answered with 400, 413 or 422."""

    def search(asked: Query) -> list[list[dict[str, Any]]]:
        queries = asked.queries if asked.queries is not None else [asked.query]
        return [[_wire(document, place, asked.return_scores) for place, document in
                 enumerate(retriever.search(query, asked.topk or 3), start=1)] for query in queries]

    async def retrieve(request: Request) -> JSONResponse:
        body = await read_body(request)
        try:
            asked = Query.model_validate_json(body)
        except ValidationError as invalid:
            no_json = any(e["type"] == "json_invalid" for e in invalid.errors())
            raise HTTPException(400 if no_json else 422, "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in invalid.errors())) from invalid
        if asked.queries is None and asked.query is None:
            raise HTTPException(422, "give `queries`, a list of texts, or `query`, one text")
        return JSONResponse({"result": await host.run(search, asked)})

    return application([Route("/retrieve", retrieve, methods=["POST"])], host=bound_to)


def _wire(document: Document, place: int, with_score: bool) -> dict[str, Any]:
    contents = f'"{document.title}"\n{document.text}' if document.title else document.text
    row = {"id": document.id, "title": document.title, "text": document.text, "contents": contents}
    # A retriever gives an order and no scores.
    return {"document": row, "score": 1.0 / place} if with_score else row
