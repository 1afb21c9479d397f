"""Hydra's launchers of perfexp; Hydra accepts classes of this namespace only."""
