"""Layouts and needs of a replica found out before there is one."""
