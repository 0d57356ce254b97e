"""A task file that needs a package that no environment has."""

import a_package_that_no_environment_has  # noqa: F401
