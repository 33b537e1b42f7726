//! Writes every CRD into a folder, by default `operator/crds`.
#![expect(clippy::print_stdout, reason = "prints the written files")]

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../crds");
    let folder = std::env::args_os().nth(1).map_or_else(|| PathBuf::from(default), PathBuf::from);
    std::fs::create_dir_all(&folder)?;
    for crd in rbg_api::crds::all() {
        let path = folder.join(format!("{}.yaml", crd.spec.names.plural));
        std::fs::write(&path, serde_saphyr::to_string(&crd)?)?;
        println!("{}", path.display());
    }
    Ok(())
}
