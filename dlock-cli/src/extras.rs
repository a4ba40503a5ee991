//! `dlock install-extras`: man pages and completions, generated from the options.

use crate::{args::Cli, exit::Exit, output::Output};
use clap::CommandFactory;
use clap_complete::Shell;
use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

/// Installs below the prefix, where shells and man(1) look, and prints each directory.
pub(crate) fn install(prefix: Option<&Path>, output: &Output) -> Exit {
    let prefix = match prefix.map(Path::to_owned).or_else(usual) {
        Some(prefix) => prefix,
        None => {
            output.misuse("$HOME is no absolute path: say where with --prefix");
            return Exit::USAGE;
        }
    };
    for (folder, shell) in FOLDERS {
        let folder = prefix.join(folder);
        let object = serde_json::json!({"installed": folder});
        let written = fs::create_dir_all(&folder).and_then(|()| generate(shell, &folder));
        if let Err(error) = written {
            let message = format!("cannot write into {}: {error}", folder.display());
            output.problem("Unavailable", &message, "", None);
            return Exit::UNREACHABLE;
        }
        if output
            .result(&object, &folder.display().to_string())
            .is_err()
        {
            return Exit::OUTPUT;
        }
    }
    Exit::DONE
}

/// Where man(1) and each shell look below a prefix; `None`: the man pages.
const FOLDERS: [(&str, Option<Shell>); 4] = [
    ("share/man/man1", None),
    ("share/bash-completion/completions", Some(Shell::Bash)),
    ("share/zsh/site-functions", Some(Shell::Zsh)),
    ("share/fish/vendor_completions.d", Some(Shell::Fish)),
];

fn generate(shell: Option<Shell>, folder: &Path) -> io::Result<()> {
    let mut command = Cli::command();
    match shell {
        Some(shell) => clap_complete::generate_to(shell, &mut command, "dlock", folder).map(drop),
        None => clap_mangen::generate_to(command, folder),
    }
}

fn usual() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some("/usr/local".into());
    }
    let home = env::var_os("HOME").map(PathBuf::from);
    let home = home.filter(|home| home.is_absolute());
    home.map(|home| home.join(".local"))
}
