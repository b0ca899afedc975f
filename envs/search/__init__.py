"""Multi-turn retrieval question answering: `turngym/Search-v0`."""

try:
    from envs.search.environment import Search
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; pip install "turngym[search]" installs what the search environment needs',
                              name=error.name) from error

__all__ = ["Search"]
