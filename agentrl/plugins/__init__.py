"""Plug-ins: references to user-supplied code (`module:attr`), the parts of a recipe that they can replace, and protocol checks."""
