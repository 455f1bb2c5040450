"""The software bill of materials in the wheel: limitgate.cdx.json, CycloneDX 1.6 (PEP 770).

The wheel bundles no other software. The bill lists what an installation brings along, and what each extra adds.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).parent.parent
FILE = ROOT / "limitgate.cdx.json"
_FOR_DEVELOPMENT = frozenset({"bench", "dev", "fuzz", "proxies", "release", "site", "test"})
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?([^;]*)")


def text() -> str:
    """The bill as text. Equal for equal metadata, so that builds can be repeated."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = project["name"], project["version"]
    root = Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"pkg:pypi/{name}@{version}",
        purl=PackageURL("pypi", None, name, version),
        licenses=[DisjunctiveLicense(id=project["license"])],
    )
    bom = Bom(components=[], serial_number=uuid5(NAMESPACE_URL, f"pkg:pypi/{name}@{version}"))
    bom.metadata.component = root
    extras = {key: lines for key, lines in project["optional-dependencies"].items() if key not in _FOR_DEVELOPMENT}
    wanted: dict[str, list[Property]] = {}
    for group, lines in [("", project["dependencies"]), *extras.items()]:
        for line in lines:
            package, bounds = (part.strip() for part in _REQUIREMENT.match(line).groups())  # type: ignore[union-attr]
            scope = (
                Property(name="limitgate:extra", value=group) if group else Property(name="limitgate:required", value="true")
            )
            wanted.setdefault(package.lower(), []).extend([scope, Property(name="limitgate:versions", value=bounds)])
    components = [
        Component(
            name=package,
            type=ComponentType.LIBRARY,
            bom_ref=f"pkg:pypi/{package}",
            purl=PackageURL("pypi", None, package),
            properties=properties,
        )
        for package, properties in sorted(wanted.items())
    ]
    for component in components:
        bom.components.add(component)
    bom.register_dependency(root, components)
    written = JsonV1Dot6(bom).output_as_string(indent=2)
    return re.sub(r',\n +"timestamp": "[^"]*"', "", written) + "\n"
