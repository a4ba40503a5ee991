//! The workspace as `cargo metadata` describes it.

use crate::Result;
use crate::step::{cargo, output};
use serde_json::Value;
use std::path::{Path, PathBuf};

pub(crate) struct Workspace {
    pub(crate) packages: Vec<Package>,
    pub(crate) target: PathBuf,
}

pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    pub(crate) features: Vec<String>,
    pub(crate) servers: Servers,
    pub(crate) is_published: bool,
}

/// What the tests of a package meet: `servers` under `[package.metadata.tests]` of its manifest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Servers {
    Not,
    Processes,
    Containers,
}

impl Workspace {
    pub(crate) fn read() -> Result<Self> {
        let mut command = cargo(["metadata", "--no-deps", "--locked", "--format-version=1"]);
        let metadata: Value = serde_json::from_slice(&output(&mut command)?)?;
        let packages = metadata["packages"].as_array().into_iter().flatten();
        Ok(Self {
            packages: packages.map(Package::from_json).collect::<Result<_>>()?,
            target: text(&metadata["target_directory"])?.into(),
        })
    }

    /// The packages of these names or folders.
    pub(crate) fn named(&self, names: &[&str]) -> Result<Vec<&Package>> {
        let find = |name: &&str| {
            let folder = Path::new(name.trim_end_matches('/'));
            let mut packages = self.packages.iter();
            packages
                .find(|package| package.name == *name || package.folder.ends_with(folder))
                .ok_or_else(|| format!("no package of this workspace is named {name:?}").into())
        };
        names.iter().map(find).collect()
    }
}

impl Package {
    fn from_json(package: &Value) -> Result<Self> {
        let manifest = Path::new(text(&package["manifest_path"])?);
        let features = package["features"].as_object().into_iter().flatten();
        let servers = match package["metadata"]["tests"]["servers"].as_str() {
            None => Servers::Not,
            Some("processes") => Servers::Processes,
            Some("containers") => Servers::Containers,
            Some(other) => {
                return Err(format!("{}: no servers {other:?}", manifest.display()).into());
            }
        };
        Ok(Self {
            name: text(&package["name"])?.to_owned(),
            folder: manifest
                .parent()
                .ok_or("a manifest is in a folder")?
                .to_owned(),
            features: features.map(|(name, _)| name.clone()).collect(),
            servers,
            is_published: package["publish"]
                .as_array()
                .is_none_or(|to| !to.is_empty()),
        })
    }
}

fn text(value: &Value) -> Result<&str> {
    value
        .as_str()
        .ok_or_else(|| "cargo metadata has another form".into())
}
