"""Plug-ins: references to user-supplied code (`module:attr`), the recipe parts that such code can replace, and protocol checks."""
