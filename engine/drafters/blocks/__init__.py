"""Methods whose drafter fills a whole block of places in one forward."""
