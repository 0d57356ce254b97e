"""How far a judge can be trusted: people's labels, a judge's agreement with them, and what follows for the rates that it gives."""
