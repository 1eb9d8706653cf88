"""Versions between processes beyond what `weightlane bench` measures: a slow link (`slow-link.sh`), and the control plane."""
