//! Directory driver: locks in a directory of files. It is a complete driver over a store of one record per
//! name, as the tutorial of the driver kit shows it.

use async_trait::async_trait;
use dlock_core::{
    Client, LockName,
    driver::{
        Capabilities, DriverError, Result,
        kit::{
            Call, Expected, Listed, Read, Record, RecordDriver, RecordStore, StoreTime, Stored,
            Write, Written, from_hex, to_hex,
        },
    },
};
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// A lock directory: a file per name, and a file `lock` that is locked for each step.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    capabilities: Capabilities,
}

impl Directory {
    /// Opens a directory, and creates it if it is missing.
    ///
    /// # Errors
    /// When it cannot be created.
    pub(crate) fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        fs::create_dir_all(&path)?;
        let path = path.as_ref().canonicalize()?;
        let mut capabilities = Capabilities::new("directory", path.display().to_string());
        capabilities.shares = true; // records decide about sharers, too
        Ok(Self { path, capabilities })
    }

    /// Runs one step while no other process runs one. The step runs to its end in a thread of its own, even
    /// when the caller is gone.
    async fn step<T: Send + 'static>(
        &self,
        step: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let this = self.clone();
        let ran = tokio::task::spawn_blocking(move || {
            let lock = File::create(this.path.join("lock"))?;
            lock.lock()?; // until it is closed
            step(&this)
        });
        match ran.await {
            Ok(Ok(answer)) => Ok(answer),
            // Each step writes at most one file, and by its last call: a step that failed did nothing.
            Ok(Err(error)) => {
                Err(DriverError::unavailable("the directory could not be used").with_source(error))
            }
            Err(error) => Err(DriverError::unanswered("the step was cancelled").with_source(error)),
        }
    }

    /// The path of a name's record. A name is any text, but a file's name is not, so the name's bytes are
    /// written in hex, in pieces that a file system accepts.
    pub(crate) fn file(&self, name: &LockName) -> PathBuf {
        let hex = to_hex(name.as_str());
        let pieces = hex.as_bytes().chunks(200).map(String::from_utf8_lossy);
        let pieces: Vec<_> = pieces.collect();
        self.path.join("records").join(pieces.join("/") + ".record")
    }

    fn stored(&self, name: &LockName) -> io::Result<Stored> {
        match fs::read_to_string(self.file(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Stored::Absent),
            text => Ok(match text?.trim_end().parse::<Record>() {
                Ok(record) => Stored::Record(record),
                Err(damaged) => Stored::Damaged(damaged),
            }),
        }
    }

    fn replace(&self, write: &Write) -> io::Result<Written> {
        if now().now > write.not_after {
            return Ok(Written::Late);
        }
        if Expected::of(&self.stored(&write.name)?) != write.expected {
            return Ok(Written::Changed);
        }
        let (file, made) = (self.file(&write.name), self.path.join("next"));
        fs::write(&made, format!("{}\n", write.record))?;
        fs::create_dir_all(file.parent().unwrap_or(&self.path))?;
        fs::rename(made, file)?; // all of it or nothing
        Ok(Written::Written)
    }

    /// The names of a page, in order.
    fn names_after(&self, prefix: &str, after: &[u8], limit: usize) -> io::Result<Vec<LockName>> {
        let (mut names, records) = (Vec::new(), self.path.join("records"));
        if records.exists() {
            self.names(&records, "", &mut names)?;
        }
        names.retain(|name| name.as_str().starts_with(prefix) && name.as_str().as_bytes() > after);
        names.sort();
        names.truncate(limit);
        Ok(names)
    }

    /// Every name under a folder, decoded from the hex.
    fn names(&self, folder: &Path, before: &str, names: &mut Vec<LockName>) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let piece = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                self.names(&entry.path(), &format!("{before}{piece}"), names)?;
            } else if let Some(hex) = piece.strip_suffix(".record") {
                let name = from_hex(&format!("{before}{hex}"));
                let name = name.and_then(|name| String::from_utf8(name).ok());
                names.extend(name.and_then(|name| LockName::new(name).ok()));
            }
        }
        Ok(())
    }
}

#[async_trait]
impl RecordStore for Directory {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn read(&self, names: &[LockName], _: Call) -> Result<Read> {
        let names = names.to_vec();
        self.step(move |this| {
            let records = names.iter().map(|name| this.stored(name));
            Ok(Read {
                time: now(),
                records: records.collect::<io::Result<_>>()?,
            })
        })
        .await
    }

    async fn write(&self, writes: &[Write], _: Call) -> Result<Vec<Written>> {
        let writes = writes.to_vec();
        self.step(move |this| {
            let written = writes.iter().map(|write| {
                this.replace(write).unwrap_or_else(|error| {
                    Written::Failed(
                        DriverError::unavailable("the record could not be written")
                            .with_source(error),
                    )
                })
            });
            Ok(written.collect())
        })
        .await
    }

    async fn list(&self, prefix: &str, after: &[u8], limit: usize) -> Result<Listed> {
        let (prefix, after) = (prefix.to_owned(), after.to_owned());
        self.step(move |this| {
            let names = this.names_after(&prefix, &after, limit)?;
            let last = names.last().filter(|_| names.len() == limit);
            let next = last.map(|name| name.as_str().into());
            let records = names
                .into_iter()
                .map(|name| Ok((name.clone(), this.stored(&name)?)));
            let records = records.collect::<io::Result<_>>()?;
            Ok(Listed {
                time: now(),
                records,
                next,
            })
        })
        .await
    }

    async fn forget(&self, after: &[u8]) -> Result<Option<Vec<u8>>> {
        let after = after.to_owned();
        self.step(move |this| {
            let names = this.names_after("", &after, PAGE)?;
            for name in &names {
                if let Stored::Record(record) = this.stored(name)?
                    && record.is_forgettable(now())
                {
                    fs::remove_file(this.file(name))?;
                }
            }
            let last = names.last().filter(|_| names.len() == PAGE);
            Ok(last.map(|name| name.as_str().into()))
        })
        .await
    }

    async fn close(&self) {}
}

/// The number of names that one sweep checks.
const PAGE: usize = 256;

/// The machine's clock is the store's: all its clients share it.
fn now() -> StoreTime {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    StoreTime::wall(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let path = std::env::temp_dir().join(format!("dlock-directory-{}", std::process::id()));
    let client = Client::new(RecordDriver::new(Directory::open(&path)?))?;
    let guard = client.lock("report")?.acquire().await?;
    println!("held with token {:?}", guard.token());
    guard.release().await?;
    client.shutdown(std::time::Duration::ZERO).await?;
    fs::remove_dir_all(path)?;
    Ok(())
}
