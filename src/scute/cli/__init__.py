"""The `scute` command. One file a subcommand: it parses, calls one function of the library, and renders."""
