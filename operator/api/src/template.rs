//! Pod templates, preserved as they were written.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// `core/v1` PodTemplateSpec as JSON. Typed structures have the fields of one Kubernetes release and drop those of later
/// ones; templates are only passed through, so no field may be lost.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PodTemplate(pub Map<String, Value>);

impl PodTemplate {
    /// Value of a label of the template.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        self.0.get("metadata")?.get("labels")?.get(key)?.as_str()
    }

    /// Value of an annotation of the template.
    #[must_use]
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.0.get("metadata")?.get("annotations")?.get(key)?.as_str()
    }

    /// Sets labels, replacing those of the same name.
    pub fn set_labels<'a>(&mut self, labels: impl IntoIterator<Item = (&'a String, &'a String)>) {
        self.set_texts("labels", labels);
    }

    /// Sets annotations, replacing those of the same name.
    pub fn set_annotations<'a>(&mut self, annotations: impl IntoIterator<Item = (&'a String, &'a String)>) {
        self.set_texts("annotations", annotations);
    }

    /// Removes an annotation of the template.
    pub fn remove_annotation(&mut self, key: &str) {
        let metadata = self.0.get_mut("metadata").and_then(Value::as_object_mut);
        let annotations =
            metadata.and_then(|metadata| metadata.get_mut("annotations")).and_then(Value::as_object_mut);
        if let Some(annotations) = annotations {
            annotations.remove(key);
        }
    }

    /// The pod's spec; created if it is missing.
    pub fn spec_mut(&mut self) -> &mut Map<String, Value> {
        member_object(&mut self.0, "spec")
    }

    /// The containers; empty if there are none.
    #[must_use]
    pub fn containers(&self) -> &[Value] {
        self.list("containers")
    }

    /// The init containers; empty if there are none.
    #[must_use]
    pub fn init_containers(&self) -> &[Value] {
        self.list("initContainers")
    }

    /// A list of the spec, for example `containers` or `volumes`; created if it is missing.
    pub fn list_mut(&mut self, name: &str) -> &mut Vec<Value> {
        member_list(self.spec_mut(), name)
    }

    fn list(&self, name: &str) -> &[Value] {
        let list = self.0.get("spec").and_then(|spec| spec.get(name)).and_then(Value::as_array);
        list.map_or(&[], Vec::as_slice)
    }

    fn set_texts<'a>(&mut self, member: &str, texts: impl IntoIterator<Item = (&'a String, &'a String)>) {
        let mut texts = texts.into_iter().peekable();
        if texts.peek().is_some() {
            let target = member_object(member_object(&mut self.0, "metadata"), member);
            target.extend(texts.map(|(key, value)| (key.clone(), Value::String(value.clone()))));
        }
    }
}

/// The object `name` inside `parent`; another value is replaced by an empty object.
pub fn member_object<'a>(parent: &'a mut Map<String, Value>, name: &str) -> &'a mut Map<String, Value> {
    let member = parent.entry(name).or_insert_with(|| Value::Object(Map::new()));
    if !member.is_object() {
        *member = Value::Object(Map::new());
    }
    let Value::Object(object) = member else { unreachable!("it was just set to an object") };
    object
}

/// The list `name` inside `parent`; another value is replaced by an empty list.
pub fn member_list<'a>(parent: &'a mut Map<String, Value>, name: &str) -> &'a mut Vec<Value> {
    let member = parent.entry(name).or_insert_with(|| Value::Array(Vec::new()));
    if !member.is_array() {
        *member = Value::Array(Vec::new());
    }
    let Value::Array(list) = member else { unreachable!("it was just set to a list") };
    list
}
