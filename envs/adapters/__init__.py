"""Environments written for other libraries, offered as text environments. See docs/interop.md."""
