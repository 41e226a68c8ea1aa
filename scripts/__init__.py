"""Commands for developers: composing example data and training the committed adapters."""
