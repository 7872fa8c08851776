"""Golden kinds of which nothing is built yet: kind -> why. A kind leaves this table for a module of its own."""

KINDS = {
    "quant": "no quantised weights yet",
}
