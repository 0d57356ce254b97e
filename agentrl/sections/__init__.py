"""The sections of a recipe, by subject. `agentrl.recipe` hands them on, and says what must fit together between them."""
