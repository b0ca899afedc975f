"""Environments as servers. See docs/interop.md."""

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
    import websockets  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; pip install "turngym[serve]" installs what serving needs',
                              name=error.name) from error
