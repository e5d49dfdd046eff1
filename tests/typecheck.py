"""The type checker that tests put around the package."""

from beartype import BeartypeConf, beartype

# An int where the annotation says float is right by PEP 484's numeric tower, which beartype leaves out unless told.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
