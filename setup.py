"""Maps each top-level folder to a sub-package of the ``weightlane`` namespace.

The folders have short, generic names (``trainer``, ``sync``); they must never be importable as such. Only this mapping makes
them ``weightlane.trainer`` and so on, in wheels and in editable installs alike.
"""

from setuptools import setup
from setuptools.discovery import PackageFinder

FOLDERS = ("ckpt_engines", "sync", "trainer", "rollout", "plugins", "cli")

package_dir = {f"weightlane.{folder}": folder for folder in FOLDERS}
packages = sorted(
    f"weightlane.{folder}" + (f".{sub}" if sub else "")
    for folder in FOLDERS
    for sub in ("", *PackageFinder.find(folder, exclude=["packages", "packages.*"]))
)

package_data = {package: ["py.typed"] for package in packages}
package_data["weightlane.cli.report"] = ["page_files/*"]
# `weightlane new-engine` finds the templates beside its package in a checkout, so the wheel has them there too.
package_data["weightlane.plugins"] += [
    f"packages/weightlane-{template}/{files}"
    for template in ("engine-template", "training-engine-template", "rollout-engine-template")
    for files in ("README.md", "pyproject.toml", "*.py", "tests/*.py")
]

setup(packages=packages, package_dir=package_dir, package_data=package_data)
