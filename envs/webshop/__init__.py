"""WebShop: a shop of pages, a search, instructions and a reward for what is bought. See docs/webshop.md."""
