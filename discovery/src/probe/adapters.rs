//! LoRA adapters that engines report, with what their block hashes depend on.

use serde_json::Value;

use super::responses::SglangServerInfo;
use super::version::release;
use crate::topology::LoraAdapterFacts;

/// The oldest vLLM that hashes the path of an adapter in addition to its name.
const VLLM_ADAPTER_PATH_SINCE: (u32, u32, u32) = (0, 32, 0);

/// vLLM: adapters with the path, if the release hashes it. A build without a number counts as a new release.
pub(super) fn vllm(version: &str, reported: Vec<(String, Option<String>)>) -> Vec<LoraAdapterFacts> {
    let hashes_path = release(version).is_none_or(|release| release >= VLLM_ADAPTER_PATH_SINCE);
    let adapter = |(name, path): (String, Option<String>)| LoraAdapterFacts {
        name,
        path: path.filter(|_| hashes_path),
        id: None,
    };
    reported.into_iter().map(adapter).collect()
}

/// SGLang: adapters with their identifiers, which only `/server_info` has, and only for adapters of the command line.
pub(super) fn sglang(
    info: &SglangServerInfo,
    reported: Vec<(String, Option<String>)>,
) -> Vec<LoraAdapterFacts> {
    let configured: Vec<LoraAdapterFacts> = info
        .lora_paths
        .as_ref()
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(reference)
        .collect();
    let adapter = |(name, path): (String, Option<String>)| {
        let same = configured.iter().find(|known| known.name == name && known.path == path);
        LoraAdapterFacts { id: same.and_then(|known| known.id.clone()), name, path }
    };
    reported.into_iter().map(adapter).collect()
}

/// `[id, name, path, pinned]`, or an object with these members.
fn reference(value: &Value) -> Option<LoraAdapterFacts> {
    let member = |position: usize, name: &str| {
        let member = value.get(position).or_else(|| value.get(name))?;
        member.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
    };
    Some(LoraAdapterFacts {
        id: member(0, "lora_id"),
        name: member(1, "lora_name")?,
        path: member(2, "lora_path"),
    })
}

/// Adds the names by which SGLang's OpenAI API selects an adapter: `base:adapter`. It serves other names with the base model.
pub(super) fn add_sglang_names(names: &mut Vec<String>, adapters: &[LoraAdapterFacts]) {
    let Some(base) = names.iter().find(|name| adapters.iter().all(|adapter| adapter.name != **name)).cloned()
    else {
        return;
    };
    for adapter in adapters {
        let name = format!("{base}:{}", adapter.name);
        if names.contains(&adapter.name) && !names.contains(&name) {
            names.push(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(name: &str, path: Option<&str>, id: Option<&str>) -> LoraAdapterFacts {
        LoraAdapterFacts { name: name.to_owned(), path: path.map(str::to_owned), id: id.map(str::to_owned) }
    }

    fn reported() -> Vec<(String, Option<String>)> {
        ["poet", "coder"].map(|name| (name.to_owned(), Some(format!("/adapters/{name}")))).to_vec()
    }

    #[test]
    fn vllm_reports_the_path_if_it_is_hashed() {
        assert_eq!(vllm("0.32.0", reported())[0], facts("poet", Some("/adapters/poet"), None));
        assert_eq!(vllm("0.31.2", reported())[1], facts("coder", None, None));
    }

    #[test]
    fn sglang_identifies_adapters_of_the_command_line() {
        for (poet, coder) in [
            (r#"["c4","poet","/adapters/poet",null]"#, r#"["9f","coder","/elsewhere",false]"#),
            (r#"{"lora_id":"c4","lora_name":"poet","lora_path":"/adapters/poet"}"#, "null"),
        ] {
            let body = format!(r#"{{"model_path":"m","lora_paths":[{poet},{coder},7]}}"#);
            let info = SglangServerInfo::parse(body.as_bytes()).unwrap();
            // The second one was loaded again from another folder.
            let expected = vec![
                facts("poet", Some("/adapters/poet"), Some("c4")),
                facts("coder", Some("/adapters/coder"), None),
            ];
            assert_eq!(sglang(&info, reported()), expected);
        }
    }

    #[test]
    fn sglang_adapters_are_named_with_their_base() {
        let adapters = [facts("poet", None, None), facts("coder", None, None)];
        let mut names = vec!["tiny".to_owned(), "poet".to_owned()];
        add_sglang_names(&mut names, &adapters);
        assert_eq!(names, ["tiny", "poet", "tiny:poet"], "only adapters that are served");
        let mut names = vec!["poet".to_owned()];
        add_sglang_names(&mut names, &adapters);
        assert_eq!(names, ["poet"]);
    }
}
