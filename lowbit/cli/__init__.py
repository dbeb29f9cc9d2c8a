"""The command line: thin Typer commands; heavy imports happen inside them."""
